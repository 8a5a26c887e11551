"""How a weight is stored."""
