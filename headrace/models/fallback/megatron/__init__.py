"""Models of Megatron-core whose attention is headrace's."""
