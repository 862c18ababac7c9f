"""Number formats of checkpoints, as GGUF files and ``quantization_config`` name them: one file for each family of methods."""
