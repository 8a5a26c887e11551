"""Memory: blocks, manager."""
