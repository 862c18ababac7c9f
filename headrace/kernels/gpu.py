"""Dispatch to the Triton kernels, for tensors on a GPU that can run them.

Triton is optional, and a CPU needs none: modules of kernels are imported when the first of them is to run. To a type checker
they are ordinary modules, so it checks each call against the kernel's signature::

    if TYPE_CHECKING:
        from headrace.kernels.norm import triton as kernels
    else:
        kernels = gpu.Late(f"{__name__}.triton")
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
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


class Late:
    """A module that is imported when one of its names is first asked for."""

    def __init__(self, module: str) -> None:
        self._name = module

    @functools.cached_property
    def _module(self) -> ModuleType:
        return importlib.import_module(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def dispatch(
    reference: Callable[Concatenate[torch.Tensor, P], R],
    kernel: str | None = "triton",
    native: Callable[Concatenate[torch.Tensor, P], R | None] | None = None,
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Calls the kernel if the first argument is on a GPU, and else the reference. All have the same signature.

    Args:
        kernel: the module beside the reference's where the kernel has the reference's name, less ``_ref``; None: there is none.
        native: computes on a CPU, or returns None for tensors that it does not support.
    """
    module = None if kernel is None else Late(f"{reference.__module__.rpartition('.')[0]}.{kernel}")
    name = reference.__name__.removesuffix("_ref")

    @functools.wraps(reference)
    def run(x: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if module is not None and takes(x):
            return getattr(module, name)(x, *args, **kwargs)  # type: ignore[no-any-return]
        if native is not None and (found := native(x, *args, **kwargs)) is not None:
            return found
        return reference(x, *args, **kwargs)

    return run
