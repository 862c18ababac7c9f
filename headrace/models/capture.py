"""Tries to capture a model in CUDA graphs, and reports why it fails.

A captured step must not wait for the GPU. Running the model shows where it does: a step under
``no_host_sync`` raises at the first wait and leaves the GPU's state as it was, which a capture that fails halfway does not.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Makes PyTorch raise RuntimeError where the host would wait for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def eager_reason(error: BaseException, model: object) -> str:
    """Explains why a model runs eagerly: which module failed when a step was tried or captured as a CUDA graph."""
    where = failing_module(error, model) or type(model).__name__
    return f"a step cannot be captured: {where}: {one_line(error)}"


def failing_module(error: BaseException, model: object) -> str:
    """Returns the path of the innermost module of ``model`` that raised ``error``; empty: none of its submodules."""
    if not isinstance(model, nn.Module):
        return ""
    paths = {module: path for path, module in model.named_modules()}
    running = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    found = [paths[module] for module in running if isinstance(module, nn.Module) and module in paths]
    return next(filter(None, reversed(found)), "")


def one_line(error: BaseException, most: int = 300) -> str:
    """Formats the error's type and text in one line of at most ``most`` characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]
