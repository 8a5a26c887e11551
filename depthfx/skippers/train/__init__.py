"""Training a skipper, FlexiDepth's router and adapter in each routed layer, on a frozen Hugging Face model."""

from __future__ import annotations
