"""Attention on GPUs with FlashInfer's kernels (Ye et al., 2025), which the optional package of that name brings."""
