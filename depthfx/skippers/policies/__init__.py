"""Which rows run a layer: one file for each policy."""
