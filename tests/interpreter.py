"""Triton's interpreter, made quicker: what it looks for at every launch, and at every call within one, is found once."""

from __future__ import annotations

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def remember_builtins() -> None:
    """A launch puts functions of numpy in the place of Triton's builtins, and puts those back at its end. To find them it sorts
    all members of Triton's modules, which takes a third of the time that kernels of small tensors take. Which names are
    builtins' does not change while no kernel runs; whether one is in its place at the moment is still asked each time.
    """
    names = {
        package: [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for package in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    }
    unknown = interpreter._patch_builtin

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            unknown(package, builder, scope)
            return
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
