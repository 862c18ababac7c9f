"""TokenLists: features that act on a list of token ids per slot, gathered into one index over a step's logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from headrace.errors import RequestError
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Feature, Indices


class TokenLists(Feature):
    """A feature whose slots each have a list of token ids and, optionally, a value for each id."""

    param: str
    """The request's parameter that lists the ids."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_slots)
        self._vocab_size = vocab_size
        self._device = device
        self._ids: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._last: tuple[tuple[bytes, bytes], tuple[torch.Tensor, torch.Tensor]] | None = None
        """The last result of ``places``, which rarely changes from one decode step to the next."""

    def put(self, slot: int, ids: Iterable[int], values: Sequence[float] = ()) -> None:
        """Makes the slot a user of the feature with these token ids.

        Raises:
            RequestError: an id is outside the vocabulary. On a GPU it would end the process, not the request.
        """
        array = np.fromiter(ids, dtype=np.int64)
        if len(array) and not 0 <= array.min() <= array.max() < self._vocab_size:
            raise RequestError(f"{self.param} has a token id outside the vocabulary of {self._vocab_size}", self.param)
        self.use(slot)
        self._ids[slot] = upload(array, self._device)
        self._values[slot] = upload(np.array(values, dtype=np.float32), self._device)
        self._last = None

    def remove(self, slot: int) -> None:
        super().remove(slot)
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
        result = places, torch.cat([self._values[slot] for slot in slots.tolist()])
        self._last = key, result
        return result
