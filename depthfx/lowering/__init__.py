"""Custom ops, kernels, and the hand-over to Inductor."""
