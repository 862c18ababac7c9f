"""MediaTables: items of the slots' sequences, and the inputs that a step's rows need because of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.context import TokenKinds
from headrace.core.media import ItemInputs, RopePositions
from headrace.core.plan import NewSequence
from headrace.kernels.transfer import SideStream, upload
from headrace.kv import Item
from headrace.model_spec import ModelFacts
from headrace.models.vision.interface import EncodedItem, VisionEncoder, encoded_item
from headrace.outputs import Failure
from headrace.runner.encoder_cache import EncoderCache
from headrace.runner.slots import RowArrays

logger = logging.getLogger("headrace.engine")


@dataclasses.dataclass(frozen=True)
class StepMedia:
    """Inputs of an eager step with tokens of items. T tokens, packed row after row."""

    inputs_embeds: torch.Tensor | None = None
    """As in ``ModelInputs``, and so are the next three."""
    embeds_mask: torch.Tensor | None = None
    extras: Mapping[int, torch.Tensor] | None = None
    rope_positions: torch.Tensor | None = None
    visible_ends: torch.Tensor | None = None
    """As in ``StepMetadata``."""
    kinds: TokenKinds | None = None
    """As in ``ForwardContext``."""


@dataclasses.dataclass
class _SlotItems:
    """The items that a slot's sequence has yet to compute."""

    items: list[tuple[Item, ItemInputs]]
    rope: npt.NDArray[np.int32] | None
    """``[3, num_prompt]``"""

    @property
    def end(self) -> int:
        """The end of the last item."""
        return self.items[-1][0].end if self.items else 0


class MediaTables:
    """Index space: slot. Rotary positions after a prompt are ``delta`` ahead of the tokens' own, in all sections.

    Args:
        encoder: None: items bring features.
        cache_bytes: as of ``EncoderCache``.
    """

    def __init__(
        self,
        model: ModelFacts,
        encoder: VisionEncoder | None,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_bytes: int,
    ) -> None:
        self._model, self._encoder = model, encoder
        self._dtype, self._device = dtype, device
        self._slots: dict[int, _SlotItems] = {}
        self._side = SideStream(device)
        self.cache = EncoderCache(cache_bytes)
        self.sectioned = model.sectioned_rope
        self.delta = torch.zeros(num_slots if self.sectioned else 0, dtype=torch.int64, device=device)
        """``[S]``"""
        self._delta: npt.NDArray[np.int64] = np.zeros(len(self.delta), dtype=np.int64)

    @property
    def has_encoder(self) -> bool:
        return self._encoder is not None

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.delta.nbytes

    def take(self, new: Sequence[NewSequence]) -> None:
        """New sequences take their slots."""
        for seq in new:
            if seq.items or seq.rope is not None:
                self._slots[seq.slot] = _SlotItems(list(zip(seq.items, seq.media, strict=True)), _positions(seq.rope))
            for item in seq.items:
                self.cache.acquire(item.content_hash)
        if not self.sectioned:
            return
        slots = np.array([seq.slot for seq in new], dtype=np.int64)
        deltas = np.array([0 if seq.rope is None else seq.rope.delta for seq in new], dtype=np.int64)
        if (self._delta[slots] != deltas).any():
            self._delta[slots] = deltas
            self.delta.index_copy_(0, upload(slots, self._device), upload(deltas, self._device))

    def release(self, slot: int) -> None:
        """The slot's sequence has left."""
        left = self._slots.pop(slot, None)
        for item, _ in left.items if left is not None else ():
            self.cache.release(item.content_hash)

    def advance(self, rows: RowArrays) -> None:
        """Drops items that the rows of a launched step have computed. Launches are in order, so what they read stays valid."""
        if not self._slots:
            return
        for slot, end in zip(rows.slots.tolist(), rows.ends.tolist(), strict=True):
            own = self._slots.get(slot)
            while own is not None and own.items and own.items[0][0].end <= end:
                self.cache.release(own.items.pop(0)[0].content_hash)

    def gather(self, rows: RowArrays) -> tuple[StepMedia | None, dict[int, Failure]]:
        """What the rows' items ask of a step.

        Returns:
            None for the inputs: the step is one of text. And slot -> why its items cannot be encoded.
        """
        if not self._slots:
            return None, {}
        batch = _Batch(rows, self._slots)
        if not batch.parts and not batch.positioned:
            return None, {}
        failed = self._encode(batch.parts)
        embeds = mask = extras = ends = kinds = None
        if batch.parts:
            embeds, mask, extras = self._features([part for part in batch.parts if part.slot not in failed], batch.num_tokens)
        if self._model.vision is not None and self._model.vision.bidirectional and batch.parts:
            ends = upload(batch.visible_ends(), self._device)
        if self._model.vision is not None and self._model.vision.own_experts and batch.parts:
            kinds = TokenKinds(*(upload(tokens, self._device) for tokens in batch.kinds()))
        rope = upload(batch.rope(self._delta), self._device) if batch.positioned else None
        return StepMedia(embeds, mask, extras, rope, ends, kinds), failed

    def _features(
        self, parts: Sequence[_Part], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[int, torch.Tensor] | None]:
        """Places the features of items at their tokens."""
        hidden = self._model.hidden_size
        embeds = torch.zeros(num_tokens, hidden, dtype=self._dtype, device=self._device)
        known = np.zeros(num_tokens, dtype=np.bool_)
        levels = 0 if self._model.vision is None else self._model.vision.deepstack_layers
        extras = {layer: torch.zeros_like(embeds) for layer in range(levels)}
        for part in parts:
            features, deep = self.cache[part.item.content_hash]
            for token, row, count in part.runs():
                embeds[token : token + count] = features[row : row + count]
                known[token : token + count] = True
                for layer, extra in extras.items():
                    if deep is not None:
                        extra[token : token + count] = deep[layer, row : row + count]
        return embeds, upload(known, self._device), extras or None

    def _encode(self, parts: Sequence[_Part]) -> dict[int, Failure]:
        """Computes the features that the cache lacks, all in one go. Returns slot -> why there are none.

        On a GPU this overlaps with the step that was launched before: nothing here depends on it, and the host is ahead.
        """
        missing = {part.item.content_hash for part in parts if part.item.content_hash not in self.cache}
        if not missing:
            return {}
        with self._side.launching():
            failed = self._encode_missing(part for part in parts if part.item.content_hash in missing)
        self._side.join(tensor for key in missing if key in self.cache for tensor in self.cache[key].tensors)
        return failed

    def _encode_missing(self, parts: Iterable[_Part]) -> dict[int, Failure]:
        failed: dict[int, Failure] = {}
        missing: dict[str, _Part] = {}
        users: dict[str, list[int]] = {}
        for part in parts:
            key = part.item.content_hash
            if key in self.cache:
                continue
            if part.media.encoded:
                self.cache.put(key, encoded_item(part.media, self._dtype, self._device))
            else:
                missing[key] = part
                users.setdefault(key, []).append(part.slot)
        if not missing:
            return failed
        if self._encoder is None:
            reason = Failure("this engine has no vision encoder (mm_encoder none)", client=True)
            return {slot: reason for slots in users.values() for slot in slots}
        try:
            found: Iterable[EncodedItem] = self._encoder.encode([part.media for part in missing.values()])
            for key, entry in zip(missing, found, strict=True):
                self.cache.put(key, entry)
        except Exception:
            for key, part in missing.items():
                try:
                    self.cache.put(key, self._encoder.encode([part.media])[0])
                except Exception as error:
                    logger.exception("a %s cannot be encoded", part.media.modality)
                    failure = Failure(f"the {part.media.modality} cannot be encoded: {type(error).__name__}: {error}")
                    failed.update(dict.fromkeys(users[key], failure))
        return failed


@dataclasses.dataclass(frozen=True)
class _Part:
    """Tokens of an item within a row of the step."""

    slot: int
    item: Item
    media: ItemInputs
    shift: int
    """Token of the packed batch, less its index in the sequence."""
    start: int
    end: int
    """The row's tokens in the sequence."""

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(token of the packed batch, feature row, count) of the feature tokens in the row."""
        row = 0
        for offset, length in self.media.runs:
            begin = self.item.start + offset
            first, last = max(begin, self.start), min(begin + length, self.end)
            if first < last:
                yield first + self.shift, row + first - begin, last - first
            row += length


class _Batch:
    """The rows of a step that compute tokens of items."""

    def __init__(self, rows: RowArrays, slots: Mapping[int, _SlotItems]) -> None:
        self._rows, self._slots = rows, slots
        self._first = np.concatenate(([0], np.cumsum(rows.counts)))
        self.num_tokens = int(self._first[-1])
        self.parts: list[_Part] = []
        self.positioned: list[int] = []
        """Rows with tokens whose rotary positions differ between sections."""
        for row, slot in enumerate(rows.slots.tolist()):
            own = slots.get(slot)
            start, end = int(rows.starts[row]), int(rows.ends[row])
            if own is None or start >= own.end:
                continue
            shift = int(self._first[row]) - start
            self.parts += [
                _Part(slot, item, media, shift, start, end)
                for item, media in own.items
                if item.start < end and start < item.end
            ]
            if own.rope is not None:
                self.positioned.append(row)

    def visible_ends(self) -> npt.NDArray[np.int32]:
        """``[T]``: tokens of a bidirectional item see its last, others themselves."""
        ends = self._places() + 1
        for part in self.parts:
            if part.item.bidirectional:
                ends[part.item.start + part.shift : part.item.end + part.shift] = part.item.end
        return ends.astype(np.int32)

    def kinds(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Tokens of text, and those of items."""
        of_items = np.zeros(self.num_tokens, dtype=np.bool_)
        for part in self.parts:
            first, end = max(part.item.start, part.start), min(part.item.end, part.end)
            of_items[first + part.shift : end + part.shift] = True
        return np.flatnonzero(~of_items), np.flatnonzero(of_items)

    def rope(self, delta: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """``[3, T]``"""
        counted = self._places() + np.repeat(delta[self._rows.slots], self._rows.counts)
        positions = np.tile(counted, (3, 1))
        for row in self.positioned:
            prompt = self._slots[int(self._rows.slots[row])].rope
            start, first = int(self._rows.starts[row]), int(self._first[row])
            if prompt is not None:
                known = prompt[:, start : int(self._rows.ends[row])]
                positions[:, first : first + known.shape[1]] = known
        return positions

    def _places(self) -> npt.NDArray[np.int64]:
        """``[T]``: index of each token in its sequence."""
        rows = self._rows
        places: npt.NDArray[np.int64] = np.arange(self.num_tokens) + np.repeat(rows.starts - self._first[:-1], rows.counts)
        return places


def _positions(rope: RopePositions | None) -> npt.NDArray[np.int32] | None:
    return None if rope is None else np.frombuffer(rope.prompt, dtype="<i4").reshape(3, -1)
