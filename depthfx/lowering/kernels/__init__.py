"""One file for each kernel."""
