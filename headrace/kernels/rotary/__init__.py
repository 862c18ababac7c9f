"""Rotary position embedding (Su et al., 2021), rotate-half style: channel i pairs with channel i + rotary_dim / 2."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.rotary import native, reference

rotate = gpu.dispatch(reference.rotate_ref, None, native.rotate)
rotate_and_write = gpu.dispatch(reference.rotate_and_write_ref, None, native.rotate_and_write)
