"""depthfx as a backend of ``torch.compile``: the same logits, without the engine."""

import torch

from depthfx.smollm2 import load_smollm2


def main() -> float:
    """Compare logits with and without the backend; returns the largest difference."""
    model, tokenizer = load_smollm2()
    inputs = tokenizer("Gravity is a fundamental concept in physics", return_tensors="pt")
    with torch.inference_mode():
        expected = model(**inputs, use_cache=False).logits
        actual = torch.compile(model, backend="depthfx")(**inputs, use_cache=False).logits
    difference = (actual - expected).abs().max().item()
    print(f"largest difference of the logits: {difference:.2e}")
    return difference


if __name__ == "__main__":
    main()
