"""Loading of checkpoint tensors into a model's parameters."""
