"""AdapterTables: the adapters in the host's memory, those on the device, and the adapter of each slot's sequence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import StepPlan
from headrace.errors import EngineError
from headrace.kernels.gpu import takes
from headrace.kernels.inputs import RowTensors
from headrace.kernels.lora import Segment
from headrace.layers.lora import NO_ADAPTER
from headrace.models.adapters import AdapterTargets
from headrace.models.interface import ModelInputs
from headrace.multimodal.threads import use_one_core
from headrace.runner.part import RunnerPart, StepExtras, StepHandle
from headrace.runner.parts.adapter_copies import PlaceCopies
from headrace.runner.slots import Bounds, RowArrays
from headrace.sources.adapter import AdapterFiles


def adapter_tables(parts: Sequence[RunnerPart]) -> AdapterTables:
    """Returns the part of a runner that has the adapters. Raises EngineError if there is none."""
    for part in parts:
        if isinstance(part, AdapterTables):
            return part
    raise EngineError("the engine has no adapters (--enable-lora)")


class AdapterTables(RunnerPart):
    """An adapter stays in its place on the device until another needs the place, that of the one unused for the longest time.
    No result depends on the place."""

    def __init__(
        self, targets: AdapterTargets, num_slots: int, num_places: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``num_slots``: of sequences. ``num_places``: for adapters on the device."""
        self._targets, self._dtype, self._device = targets, dtype, device
        # Reading takes hundreds of small operations: threads would wait for each other after every one.
        self._reader = ThreadPoolExecutor(1, "headrace-adapters", use_one_core)
        self._reading: dict[str, Future[Callable[[int], None]]] = {}
        """digest -> its reading, in a thread"""
        self._loaded: dict[str, Callable[[int], None]] = {}
        """digest -> fills a place with the adapter"""
        self._copies = PlaceCopies(targets.memory) if device.type == "cuda" else None
        self._places: dict[str, int] = {}
        """Digest -> place on the device; the one used last is the last."""
        self._free = list(reversed(range(num_places)))
        self._users: npt.NDArray[np.int64] = np.zeros(num_places, dtype=np.int64)
        """``[places]``: sequences in slots that have the adapter."""
        self._of_slot: npt.NDArray[np.int32] = np.full(num_slots, NO_ADAPTER, dtype=np.int32)
        # The last entry is that of padding rows, whose slot is -1.
        self._table = torch.full((num_slots + 1,), NO_ADAPTER, dtype=torch.int32, device=device)
        """``[slots + 1]``: slot -> place of its sequence's adapter."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slots' table. The places are counted with the weights."""
        return self._table.nbytes

    def load(self, files: AdapterFiles, *, wait: bool) -> bool:
        """Begins to read an adapter into the host's memory, and to send it to the device if there is a place, beside the steps;
        or goes on with that. Returns whether it is done.

        Args:
            wait: returns once it is in the host's memory.

        Raises:
            ConfigError: it does not fit the model.
        """
        digest = files.digest
        if digest not in self._loaded:
            if digest not in self._reading:
                self._reading[digest] = self._reader.submit(self._read, files)
            if not wait and not self._reading[digest].done():
                return False
            self._loaded[digest] = self._reading.pop(digest).result()
        return wait or self._copies is None or self._send(digest, self._copies)

    def _send(self, digest: str, copies: PlaceCopies) -> bool:
        """Sends some of an adapter to the device. Returns whether none is left, or there is no place that nothing needs."""
        if digest not in self._places:
            place = self._make_room(settled=True)
            if place is None:
                return True
            self._places[digest] = place
            self._loaded[digest](place)
        return copies.go_on(self._places[digest])

    def _read(self, files: AdapterFiles) -> Callable[[int], None]:
        adapter = self._targets.read(files, self._dtype)
        if self._copies is None:
            return functools.partial(self._targets.put, adapter=adapter)
        return functools.partial(self._copies.begin, pieces=self._copies.pieces(self._targets.image(adapter)))

    def drop(self, digest: str) -> None:
        """Forgets an adapter that no sequence has. Its place on the device keeps it until another needs the place."""
        self._reading.pop(digest, None)
        self._loaded.pop(digest, None)

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if (place := self._of_slot[slot]) != NO_ADAPTER:
                self._users[place] -= 1
                self._set(slot, NO_ADAPTER)

    def begin(self, plan: StepPlan) -> None:
        """Copies adapters of new sequences to the device, in the order of the steps.

        Raises:
            EngineError: an adapter is not loaded, or more are in use than there are places.
        """
        for seq in plan.new:
            if seq.adapter is not None:
                place = self._place(seq.adapter)
                self._users[place] += 1
                self._set(seq.slot, place)

    def _set(self, slot: int, place: int) -> None:
        self._of_slot[slot] = place
        self._table[slot].fill_(place)

    def _place(self, digest: str) -> int:
        place = self._places.pop(digest, None)
        if place is None:
            if digest not in self._loaded:
                raise EngineError(f"the plan has a sequence with the adapter {digest}, which is not loaded")
            place = self._make_room()
            if place is None:
                raise EngineError(f"the plan has sequences with more than {len(self._users)} adapters")
            self._loaded[digest](place)
        self._places[digest] = place
        if self._copies is not None:
            self._copies.finish(place)
        return place

    def _make_room(self, *, settled: bool = False) -> int | None:
        """Takes a place that no sequence needs; None: all are needed. ``settled``: not one to which an adapter is coming."""
        if self._free:
            return self._free.pop()
        for digest, place in self._places.items():
            if not self._users[place] and not (settled and self._copies is not None and self._copies.under_way(place)):
                return self._places.pop(digest)
        return None

    def take(self, rows: RowArrays, extras: StepExtras) -> None:
        """Adds the segments of the rows that have an adapter; neighbours with the same one make one segment."""
        places = self._of_slot[rows.slots]
        if (places == NO_ADAPTER).all():
            return
        ends = np.cumsum(rows.counts)
        for place, start, end in zip(places.tolist(), (ends - rows.counts).tolist(), ends.tolist(), strict=True):
            last = extras.segments[-1] if extras.segments else None
            if place == NO_ADAPTER:
                continue
            if last is not None and last.place == place and last.end == start:
                start = extras.segments.pop().start
            extras.segments.append(Segment(start, end, place))

    def adapt(self, inputs: ModelInputs, rows: RowTensors, bounds: Bounds, extras: StepExtras) -> ModelInputs:
        """Tells the model's matrices the adapters of the tokens."""
        self._targets.rows.clear()
        if not extras.segments:
            return inputs
        self._targets.rows.segments = extras.segments
        if takes(rows.slots):
            slots = rows.slots
            if not bounds.single:
                tokens = torch.arange(len(inputs.positions), dtype=torch.int32, device=self._device)
                row = torch.searchsorted(rows.query_start[1:], tokens, right=True)
                # Tokens behind the last row are padding, as rows of slot -1 are.
                slots = torch.nn.functional.pad(rows.slots, (0, 1), value=-1)[row]
            self._targets.rows.places = self._table[slots.long()]
        return dataclasses.replace(inputs, adapters=True)

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        """Calls of the model outside steps have no adapters."""
        self._targets.rows.clear()
        if self._copies is not None:
            self._copies.used(set(self._of_slot[rows.slots].tolist()) - {NO_ADAPTER})
