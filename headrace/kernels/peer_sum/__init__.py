"""Sums of small tensors over the GPUs of all ranks, in memory that each of them maps. ``parallel.peers`` calls the kernels."""
