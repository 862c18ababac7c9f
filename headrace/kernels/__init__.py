"""Tensor functions, a folder an operation.

A folder's ``__init__`` chooses the implementation for the tensors that it is given. ``reference.py`` is plain PyTorch: the
tests compare the others with it, and it runs where they cannot. ``triton*.py`` are Triton kernels. ``native.py`` calls the C++
library, which is compiled as one and stands in ``kernels/native``. ``cuda*.py`` launch kernels in CUDA C++, the ``*.cu`` beside
them. Only modules named ``triton*`` import Triton, and nothing imports these before a kernel is to run.

Triton kernels are compiled for CUDA devices, or run by Triton's interpreter on any device with ``TRITON_INTERPRET=1`` in the
environment before they are imported. Every sum is taken in float32 and every intermediate is rounded where the reference
rounds it, so that the two differ by the order of summation only.
"""
