"""Optional CPU kernels in C++, compiled once on the machine that runs them. Without a compiler the torch references run."""

from headrace.kernels.native.library import NativeKernels, load

__all__ = ["NativeKernels", "load"]
