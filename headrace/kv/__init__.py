"""Who owns which KV block. No tensors."""
