"""SplitModel: a causal language model of transformers in two parts, the layers and the head."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.models.fallback.refusal import Unfit


class SplitModel:
    """The layers and the head of one model, callable apart.

    Heads do more than multiply (soft caps, scales, norms), each in its model's own ``forward``. So that is what runs for
    logits, while the layers that it calls return the given hidden states instead of computing them.

    Args:
        path: of the module that has the layers.
        given: names of the arguments that the head calls them with.

    Raises:
        Unfit: the layers take no positions.
    """

    def __init__(self, model: PreTrainedModel, path: str, given: frozenset[str]) -> None:
        self._model = model
        body = model.get_submodule(path)
        self._forward = body.forward
        parameters = inspect.signature(self._forward).parameters
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self._positions: torch.Tensor | None = None
        """Positions ``[1, T]`` of the pass, for position tables that are called with places in the batch."""
        tables = [] if "position_ids" in parameters else [module for module in body.modules() if _is_table_of_positions(module)]
        if "position_ids" not in parameters and not open_ended and not tables:
            raise Unfit("it takes no position_ids: where a token stands is taken from its place in the batch", path)
        for table in tables:
            table.register_forward_pre_hook(self._place, with_kwargs=True)
        self._takes_positions = "position_ids" in parameters or open_ended
        self._takes_embeds = "inputs_embeds" in parameters
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
        """The model's position of a sequence's first token: some models begin after a padding index."""
        self._handed: torch.Tensor | None = None
        body.forward = self._hand_back

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids ``[T]`` -> ``[T, hidden]``, in place of which there may be ``inputs_embeds``."""
        return self._model.get_input_embeddings()(ids)  # type: ignore[no-any-return]

    def hidden(
        self, ids: torch.Tensor | None, positions: torch.Tensor | None, embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Runs the layers: ids, or embeddings ``[1, T, hidden]``, and positions ``[1, T]`` -> ``[1, T, hidden]``.

        Positions None: those that the model makes itself.

        Raises:
            ValueError: the layers take no embeddings.
        """
        if embeds is not None and not self._takes_embeds:
            raise ValueError(f"inputs_embeds: the layers of {type(self._model).__name__} take token ids alone")
        if positions is not None and self.first_position:
            positions = positions + self.first_position
        position_ids = {"position_ids": positions} if self._takes_positions else {}
        self._positions = positions
        try:
            tokens = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
            out = self._forward(**tokens, **position_ids, **self._arguments)
        finally:
            self._positions = None
        hidden: torch.Tensor = out[0]
        return hidden

    def _place(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Passes positions ``[T]`` to a position table, whatever the layers pass to it."""
        return args, kwargs if self._positions is None else kwargs | {"position_ids": self._positions[0]}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the head: ``[1, N, hidden] -> [1, N, columns]``.

        Raises:
            Unfit: it computes something other than logits of the hidden states it is given.
        """
        ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        self._handed = hidden
        positions = {"position_ids": torch.zeros_like(ids)} if self._head_wants_positions else {}
        try:
            out = self._model(input_ids=ids, use_cache=False, **positions)
            if self._handed is not None:
                raise Unfit("its head does not call its layers")
        finally:
            self._handed = None
        logits: torch.Tensor = out.logits
        return logits

    def _hand_back(self, *args: Any, **kwargs: Any) -> _Handed:
        hidden, self._handed = self._handed, None
        if hidden is None:
            raise Unfit("its head calls its layers more than once")
        return _Handed((hidden,))


def _is_table_of_positions(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and "position_ids" in inspect.signature(module.forward).parameters


class _Handed(tuple[torch.Tensor]):
    """The layers' output for heads, which read it by index or by name; other names are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None
