"""MediaTables: items of the slots' sequences, and the inputs that a step's rows need because of them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.context import TokenKinds
from headrace.core.media import ItemInputs, RopePositions
from headrace.core.plan import StepPlan
from headrace.kernels.inputs import RowTensors
from headrace.kernels.transfer import SideStream, upload
from headrace.kv import Item
from headrace.model_spec import ModelFacts, VisionSpec
from headrace.models.interface import ModelInputs
from headrace.models.vision.interface import EncodedItem, VisionEncoder, encoded_item
from headrace.outputs import Failure
from headrace.runner.part import RunnerPart, StepExtras, StepHandle
from headrace.runner.parts.encoder_cache import EncoderCache
from headrace.runner.slots import Bounds, RowArrays

logger = logging.getLogger("headrace.engine")


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


_NOTHING = _SlotItems([], None)


class MediaTables(RunnerPart):
    """Index space: slot. Rotary positions after a prompt are ``delta`` ahead of the tokens' own, in all sections.

    Args:
        encoder: None: items bring features.
        cache_bytes: as of ``EncoderCache``.
    """

    memory_label = "features of pictures"

    def __init__(
        self,
        model: ModelFacts,
        vision: VisionSpec,
        encoder: VisionEncoder | None,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        cache_bytes: int,
    ) -> None:
        self._model, self._vision, self._encoder = model, vision, encoder
        self._dtype, self._device = dtype, device
        self._slots: dict[int, _SlotItems] = {}
        self._side = SideStream(device)
        self.cache = EncoderCache(cache_bytes)
        self.sectioned = model.sectioned_rope
        self.delta = torch.zeros(num_slots if self.sectioned else 0, dtype=torch.int64, device=device)
        """``[S]``"""
        self._delta: npt.NDArray[np.int64] = np.zeros(len(self.delta), dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.delta.nbytes

    def begin(self, plan: StepPlan) -> None:
        """Keeps the items and rotary positions of new sequences."""
        new = plan.new
        for seq in new:
            if seq.items or seq.rope is not None:
                self._slots[seq.slot] = _SlotItems(list(zip(seq.items, seq.media, strict=True)), _positions(seq.rope))
            for item in seq.items:
                self.cache.acquire(item.content_hash)
        if not (new and self.sectioned):
            return
        slots = np.array([seq.slot for seq in new], dtype=np.int64)
        deltas = np.array([0 if seq.rope is None else seq.rope.delta for seq in new], dtype=np.int64)
        if (self._delta[slots] != deltas).any():
            self._delta[slots] = deltas
            self.delta.index_copy_(0, upload(slots, self._device), upload(deltas, self._device))

    def release(self, slots: Sequence[int]) -> None:
        """Drops the items of sequences that have left."""
        for slot in slots:
            for item, _ in self._slots.pop(slot, _NOTHING).items:
                self.cache.release(item.content_hash)

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        """Drops items that the rows of a launched step have computed. Launches are in order, so what they read stays valid."""
        if not self._slots:
            return
        for slot, end in zip(rows.slots.tolist(), rows.ends.tolist(), strict=True):
            own = self._slots.get(slot)
            while own is not None and own.items and own.items[0][0].end <= end:
                self.cache.release(own.items.pop(0)[0].content_hash)

    def take(self, rows: RowArrays, extras: StepExtras) -> None:
        """Adds features of the rows' items, and what else their tokens need. Encodes what the cache lacks."""
        if not self._slots:
            return
        batch = _Batch(rows, self._slots)
        if batch.parts:
            failed = self._encode(batch.parts)
            extras.refused.update(failed)
            extras.inputs.update(self._features([part for part in batch.parts if part.slot not in failed], batch.num_tokens))
            if self._vision.bidirectional:
                extras.metadata["visible_ends"] = upload(batch.visible_ends(), self._device)
            if self._vision.own_experts:
                extras.context["kinds"] = TokenKinds(*(upload(tokens, self._device) for tokens in batch.kinds()))
        if batch.positioned:
            extras.inputs["rope_positions"] = upload(batch.rope(self._delta), self._device)

    def adapt(self, inputs: ModelInputs, rows: RowTensors, bounds: Bounds, extras: StepExtras) -> ModelInputs:
        """Moves rotary positions to those behind a prompt's items. Padding rows are at position 0."""
        if not self.sectioned:
            return inputs
        rope = inputs.positions + self.delta[_token_slots(rows, len(inputs.positions))]
        return dataclasses.replace(inputs, rope_positions=rope.clamp_(min=0))

    def _features(self, parts: Sequence[_Part], num_tokens: int) -> dict[str, Any]:
        """Places the features of items at their tokens. Returns fields of ``ModelInputs``."""
        hidden = self._model.hidden_size
        embeds = torch.zeros(num_tokens, hidden, dtype=self._dtype, device=self._device)
        known = np.zeros(num_tokens, dtype=np.bool_)
        extras = {layer: torch.zeros_like(embeds) for layer in range(self._vision.deepstack_layers)}
        for part in parts:
            features, deep = self.cache[part.item.content_hash]
            for token, row, count in part.runs():
                embeds[token : token + count] = features[row : row + count]
                known[token : token + count] = True
                for layer, extra in extras.items():
                    if deep is not None:
                        extra[token : token + count] = deep[layer, row : row + count]
        return {"inputs_embeds": embeds, "embeds_mask": upload(known, self._device), "extras": extras or None}

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


def _token_slots(rows: RowTensors, num_tokens: int) -> torch.Tensor:
    """``[T]`` int64: the slot of each token; any slot for tokens of no row."""
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=rows.slots.device)
    row = torch.searchsorted(rows.query_start[1:], tokens, right=True).clamp_(max=len(rows.slots) - 1)
    return rows.slots[row].long().clamp_(min=0)
