"""From checkpoint tensors to a model's parameters."""
