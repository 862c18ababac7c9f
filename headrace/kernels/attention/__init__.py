"""Attention over a paged cache. Backends call the reference or the Triton kernel, each with arguments of its own."""
