"""Triton kernels. The tests compare each with its plain-torch reference, mostly of the same name in ``headrace.kernels``.

They are compiled for CUDA devices, or run by Triton's interpreter on any device with ``TRITON_INTERPRET=1`` in the
environment before this package is imported. Every sum is taken in float32 and every intermediate is rounded where the
reference rounds it, so that the two differ by the order of summation only.
"""
