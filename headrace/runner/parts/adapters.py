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
    Which place an adapter has depends on the plans alone, and no result depends on the place."""

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
        self._copies: torch.cuda.Stream | None = None
        """Stream on which a GPU copies images, beside the steps in flight."""
        self._used: dict[int, torch.cuda.Event] = {}
        """place -> the end of the last step that had its adapter, on a GPU"""
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
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
        """Begins to read an adapter into the host's memory, beside the steps, or looks after that. Returns whether it is there.

        Args:
            wait: returns only then.

        Raises:
            ConfigError: it does not fit the model.
        """
        if files.digest in self._loaded:
            return True
        if files.digest not in self._reading:
            self._reading[files.digest] = self._reader.submit(self._read, files)
        if not wait and not self._reading[files.digest].done():
            return False
        self._loaded[files.digest] = self._reading.pop(files.digest).result()
        return True

    def _read(self, files: AdapterFiles) -> Callable[[int], None]:
        adapter = self._targets.read(files, self._dtype)
        if self._copies is None:
            return functools.partial(self._targets.put, adapter=adapter)
        with torch.cuda.device(self._device):
            image = self._targets.image(adapter, pinned=True)
        return functools.partial(self._copy, image=image, stream=self._copies)

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
            self._loaded[digest](place)
        self._places[digest] = place
        return place

    def _copy(self, place: int, image: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Copies an adapter to a place once no step in flight reads it. The next step waits for the copy."""
        if place in self._used:
            stream.wait_event(self._used.pop(place))
        with torch.cuda.stream(stream):
            self._targets.memory[place].copy_(image, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _make_room(self) -> int:
        if self._free:
            return self._free.pop()
        unused = next((digest for digest, place in self._places.items() if not self._users[place]), None)
        if unused is None:
            raise EngineError(f"the plan has sequences with more than {len(self._users)} adapters")
        return self._places.pop(unused)

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
        """Whoever calls the model beside the steps has no adapters."""
        self._targets.rows.clear()
        places = set(self._of_slot[rows.slots].tolist()) - {NO_ADAPTER} if self._copies is not None else ()
        if places:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
            self._used |= dict.fromkeys(places, done)
