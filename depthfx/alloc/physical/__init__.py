"""Backends of physical memory, one file each."""
