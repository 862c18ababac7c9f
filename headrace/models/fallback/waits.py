"""Where a foreign model waits for the GPU: steps that do so cannot be captured in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.models.fallback.transformers import TransformersModel
from headrace.models.fallback.verify import own_values, run

_TOKENS = 8


@torch.inference_mode()
def waits_for_device(model: TransformersModel) -> tuple[str, ...]:
    """The module in which the model first waits for its GPU; empty if in none, and on other devices.

    Observing a model without values does not find all of these: libraries wait in one dtype and not in another.
    """
    device = next(model.foreign.parameters()).device
    if device.type != "cuda":
        return ()
    # There already: taking them there would be waiting.
    ids, positions = torch.zeros(_TOKENS, dtype=torch.int64, device=device), torch.arange(_TOKENS, device=device)
    # What is made in a first pass alone (handles, workspaces, tables) does not count.
    _pass(model, ids, positions)
    entered: list[str] = []
    handles = [
        handle
        for path, module in model.foreign.named_modules()
        for handle in (module.register_forward_pre_hook(_enter(entered, path)), module.register_forward_hook(_leave(entered)))
    ]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _pass(model, ids, positions)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return (entered[-1] if entered else type(model.foreign).__name__,)
    finally:
        torch.cuda.set_sync_debug_mode(before)
        for handle in handles:
            handle.remove()
    return ()


def _pass(model: TransformersModel, ids: torch.Tensor, positions: torch.Tensor) -> None:
    with model.calls.through(own_values(model)):
        hidden = run(model, ids, positions)
    model.body.logits(hidden[None, -1:])


def _enter(entered: list[str], path: str) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        entered.append(path)

    return hook


def _leave(entered: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, args: Any, out: Any) -> None:
        entered.pop()

    return hook
