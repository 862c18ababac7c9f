"""Triton kernels. Each has a plain-torch twin, which the tests compare it with, under the same name in ``headrace.kernels``.

They are compiled for CUDA devices, or run by Triton's interpreter on any device with ``TRITON_INTERPRET=1`` in the
environment before this package is imported. Every sum is taken in float32 and every intermediate is rounded where the
twin rounds it, so that the two differ by the order of summation only.
"""
