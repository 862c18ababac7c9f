"""The Triton kernels, as the functions of this folder call them: only where a tensor is on a GPU that can run them."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from headrace.kernels import support


def takes(x: torch.Tensor) -> bool:
    """Whether x is on a device that the Triton kernels run on. Interpreted kernels are for their own tests alone."""
    return x.is_cuda and _usable(x.device)


@functools.cache
def _usable(device: torch.device) -> bool:
    return not support.refusals(device)


@functools.cache
def kernels(name: str) -> Any:
    """The module ``headrace.kernels.triton.<name>``: imported when first needed, because Triton is optional."""
    return importlib.import_module(f"headrace.kernels.triton.{name}")
