"""A caching allocator of our own behind PyTorch's memory pools."""
