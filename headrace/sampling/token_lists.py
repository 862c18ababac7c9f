"""TokenLists: ragged lists of token ids per slot, gathered into one index over a step's logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace.errors import RequestError
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Indices


class TokenLists:
    """For each slot that has one, token ids and (optionally) a value for each."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ids: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._last: tuple[tuple[bytes, bytes], tuple[torch.Tensor, torch.Tensor]] | None = None
        """The last answer of ``places``: from one decode step to the next it rarely changes."""

    def put(self, slot: int, ids: Iterable[int], param: str, values: Sequence[float] = ()) -> None:
        """Raises RequestError, naming ``param``, for an id outside the vocabulary."""
        array = np.fromiter(ids, dtype=np.int64)
        if len(array) and not 0 <= array.min() <= array.max() < self._vocab_size:
            raise RequestError(f"{param} has a token id outside the vocabulary of {self._vocab_size}", param)
        self._ids[slot] = upload(array, self._device)
        self._values[slot] = upload(np.array(values, dtype=np.float32), self._device)
        self._last = None

    def drop(self, slot: int) -> None:
        self._ids.pop(slot, None)
        self._values.pop(slot, None)
        self._last = None

    def places(self, picked: Indices, slots: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat indices into ``logits [N, vocab]`` and the values there, for rows ``picked`` of slots ``slots``."""
        key = (picked.tobytes(), slots.tobytes())
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        lists = [self._ids[slot] for slot in slots.tolist()]
        starts = np.repeat(picked * self._vocab_size, [len(ids) for ids in lists])
        places = torch.cat(lists) + upload(starts, self._device)
        answer = places, torch.cat([self._values[slot] for slot in slots.tolist()])
        self._last = key, answer
        return answer
