"""Body: a causal language model of transformers in two parts, the layers and the head that makes logits of hidden states."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.models.fallback.refusal import Refusal


class Body:
    """The layers and the head of one model, callable apart.

    Heads do more than multiply (soft caps, scales, norms), each in its model's own ``forward``. So that is what runs for
    logits; only the layers, which it calls, hand back the hidden states that are given in place of computing them.

    Args:
        path: of the module that has the layers.
        given: names of the arguments that the head calls them with.

    Raises:
        Refusal: the layers cannot be told where the tokens stand.
    """

    def __init__(self, model: PreTrainedModel, path: str, given: frozenset[str]) -> None:
        self._model = model
        body = model.get_submodule(path)
        self._forward = body.forward
        parameters = inspect.signature(self._forward).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._positions: torch.Tensor | None = None
        """Of the pass, ``[1, T]``, for tables that are asked for a place in the batch."""
        tables = [] if "position_ids" in parameters else [module for module in body.modules() if _is_table_of_positions(module)]
        if "position_ids" not in parameters and not open_ended and not tables:
            raise Refusal("it takes no position_ids: where a token stands is taken from its place in the batch", path)
        for table in tables:
            table.register_forward_pre_hook(self._place, with_kwargs=True)
        self._takes_positions = "position_ids" in parameters or open_ended
        # What a signature leaves open it takes by name from the head.
        taken = given | set(parameters) if open_ended else set(parameters)
        self._arguments: dict[str, Any] = {
            name: value
            for name, value in (("attention_mask", None), ("use_cache", False), ("return_dict", True))
            if name in taken
        }
        own: Any = inspect.signature(model.forward).parameters.get("position_ids")
        self._head_wants_positions = own is not None and own.default is own.empty
        self.first_position = 0
        """Of a sequence's first token, as the model counts: some begin behind a padding index."""
        self._handed: torch.Tensor | None = None
        body.forward = self._hand_back

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """The layers: ids and positions ``[1, T]`` -> ``[1, T, hidden]``. None: the positions that the model makes itself."""
        if positions is not None and self.first_position:
            positions = positions + self.first_position
        given = {"position_ids": positions} if self._takes_positions else {}
        self._positions = positions
        try:
            out = self._forward(input_ids=ids, **given, **self._arguments)
        finally:
            self._positions = None
        hidden: torch.Tensor = out[0]
        return hidden

    def _place(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A table of positions is told where the tokens stand, ``[T]``, whatever the layers tell it."""
        return args, kwargs if self._positions is None else kwargs | {"position_ids": self._positions[0]}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head: ``[1, N, hidden] -> [1, N, columns]``.

        Raises:
            Refusal: it computes something other than logits of the hidden states it is given.
        """
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        self._handed = hidden
        positions = {"position_ids": torch.zeros_like(ids)} if self._head_wants_positions else {}
        try:
            out = self._model(input_ids=ids, use_cache=False, **positions)
            if self._handed is not None:
                raise Refusal("its head does not call its layers")
        finally:
            self._handed = None
        logits: torch.Tensor = out.logits
        return logits

    def _hand_back(self, *args: Any, **kwargs: Any) -> _Handed:
        hidden, self._handed = self._handed, None
        if hidden is None:
            raise Refusal("its head calls its layers more than once")
        return _Handed((hidden,))


def _is_table_of_positions(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(module.forward).parameters


class _Handed(tuple[torch.Tensor]):
    """What the layers returned, as heads read it: by place, or by name with everything else absent."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None
