"""depthfx: a PyTorch compile backend for Hugging Face decoder models."""

__version__ = "0.1.0"
