"""Dispatch to the Triton kernels, for tensors on a GPU that can run them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from headrace.kernels import support

P = ParamSpec("P")
R = TypeVar("R")


def takes(x: torch.Tensor) -> bool:
    """Whether x is on a device that runs the Triton kernels. Only their own tests interpret them."""
    return x.is_cuda and _usable(x.device)


@functools.cache
def _usable(device: torch.device) -> bool:
    return not support.refusals(device)


@functools.cache
def kernels(name: str) -> Any:
    """The module ``headrace.kernels.<name>``: imported when first needed, because Triton is optional."""
    return importlib.import_module(f"headrace.kernels.{name}")


def dispatch(reference: Callable[Concatenate[torch.Tensor, P], R], module: str) -> Callable[Concatenate[torch.Tensor, P], R]:
    """The reference, or the function of its name in a module of Triton kernels if the first argument is on a GPU."""

    @functools.wraps(reference)
    def run(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        chosen = getattr(kernels(module), reference.__name__) if takes(x) else reference
        return chosen(x, *args, **kwargs)

    return run
