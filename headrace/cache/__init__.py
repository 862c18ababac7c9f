"""The KV cache's tensors."""
