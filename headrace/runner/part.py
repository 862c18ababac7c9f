"""RunnerPart: what an optional subsystem of the runner does in a step; and a step in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import Recorded, SparseOutcome, StepPlan
from headrace.kernels.inputs import RowTensors
from headrace.kernels.lora import Segment
from headrace.models.interface import ModelInputs
from headrace.outputs import Failure
from headrace.runner.clock import Stopwatch
from headrace.runner.slots import Bounds, RowArrays, SlotTables
from headrace.sampling.device import to_host
from headrace.sampling.feature import Indices
from headrace.sampling.logprobs import Measured
from headrace.sampling.sampler import Sampled


class Outcomes(Protocol):
    """Results of a part that are on their way to the host with a step's own."""

    def outcomes(self) -> dict[int, SparseOutcome]: ...


class ExpertRows(Protocol):
    """Choices of experts that are on their way to the host with a step's own results."""

    def lists(self) -> dict[int, bytes]: ...


@dataclasses.dataclass
class StepHandle:
    """A step in flight. What comes from the device is on the host once the stopwatch's last mark is past."""

    step: int
    stopwatch: Stopwatch
    rows: RowArrays | None = None
    """Rows that are complete after the step; None: the plan has no rows."""
    seq_ids: Indices = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    """``[R]``: of all rows of the plan."""
    places: Indices = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    """``[R]``: row -> its place in column 1 of ``outcome``."""
    num_places: int = 0
    refused: dict[int, Failure] = dataclasses.field(default_factory=dict)
    """seq_id -> why it was not taken in at all."""
    prompt_logprobs: dict[int, list[Measured]] = dataclasses.field(default_factory=dict)
    pooled: list[tuple[list[int], torch.Tensor]] = dataclasses.field(default_factory=list)
    """Sequences whose pooled prompts the step ends, and their results ``[len(sequences), numbers]`` float32 on the host."""
    replayed: bool | None = None
    """``StepResult.replayed`` of the step."""
    padding_tokens: int = 0
    sparse: list[Outcomes] = dataclasses.field(default_factory=list)
    """Results of the rows that attend sparsely, by forward pass."""
    routed: list[ExpertRows] = dataclasses.field(default_factory=list)
    """Experts of tokens whose sequences ask for them."""
    # Results of sampling:
    outcome: torch.Tensor | None = None
    """``LogitsInputs.outcome`` of the step. None: the step has not been sampled."""
    counts: torch.Tensor | None = None
    """``Sampled.counts`` of the step."""
    logprobs: list[tuple[Indices, Measured]] = dataclasses.field(default_factory=list)
    """``Sampled.logprobs`` of the step."""

    @classmethod
    def begin(cls, step: int, device: torch.device) -> StepHandle:
        return cls(step, Stopwatch(device))

    def pooled_results(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Gives each sequence that the step ends with its pooled result, once the stopwatch's last mark is past."""
        for seq_ids, results in self.pooled:
            yield from zip(seq_ids, results.numpy(), strict=True)

    def fetch(self, sampled: Sampled) -> None:
        """Launches the copies to the host of what ``outcome`` does not hold."""
        self.counts = None if sampled.counts is None else to_host(sampled.counts)
        self.logprobs = [(rows, measured.to_host()) for rows, measured in sampled.logprobs]


@dataclasses.dataclass(frozen=True, slots=True)
class StepExtras:
    """Fields that parts add to a step, by name. A step with any of them runs eagerly."""

    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ``ModelInputs``."""
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ``StepMetadata``."""
    context: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of ``ForwardContext``."""
    refused: dict[int, Failure] = dataclasses.field(default_factory=dict)
    """slot -> why its sequence cannot be served; no reason to run eagerly."""
    segments: list[Segment] = dataclasses.field(default_factory=list)
    """Runs of tokens with one adapter, ascending; no reason to run eagerly. Of a captured step, one that stands for any."""

    @property
    def eager(self) -> bool:
        return bool(self.inputs or self.metadata or self.context)


NO_EXTRAS = StepExtras()


class RunnerPart:
    """An optional subsystem of the runner, which calls each part of its list at these places of a step, in this order.

    What a part holds is a function of the plans. It launches on the step's stream and does not wait for the device.
    """

    memory_label = "slots"
    """The line of the memory report that ``nbytes`` is in."""

    @property
    def nbytes(self) -> int:
        """Bytes that the part holds on the device now."""
        return 0

    def note(self, event: Recorded) -> None:
        """Called with each plan of a step or of sampling before it is executed, and with what else bears on later steps."""

    def release(self, slots: Sequence[int]) -> None:
        """The slots' sequences have left."""

    def begin(self, plan: StepPlan) -> None:
        """Reads the plan's changes: new sequences have taken their slots.

        Raises:
            EngineError: the plan breaks the contract.
        """

    def take(self, rows: RowArrays, extras: StepExtras) -> None:
        """Adds what the rows that compute all layers need of the part.

        Raises:
            EngineError: the plan breaks the contract.
        """

    def context(self, rows: RowTensors, bounds: Bounds, tables: SlotTables) -> dict[str, Any]:
        """Returns fields of ``ForwardContext``: what tables say of the rows' slots. A CUDA graph may capture this."""
        return {}

    def adapt(self, inputs: ModelInputs, rows: RowTensors, bounds: Bounds, extras: StepExtras) -> ModelInputs:
        """Returns the inputs with what tables of the part say of the rows' slots. A CUDA graph may capture this."""
        return inputs

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        """Called when the model of the step is launched. ``rows``: those that are complete after it."""

    def close(self) -> None:
        """Frees what is not memory."""
