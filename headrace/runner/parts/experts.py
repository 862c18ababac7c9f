"""Records which experts the routers of a mixture chose, for sequences that ask for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from headrace.config import EngineConfig
from headrace.core.plan import StepPlan
from headrace.kernels.transfer import upload
from headrace.layers.moe import ExpertRouter
from headrace.outputs import ExpertLayers
from headrace.runner.inputs import PROMPT_ROWS, StepBuffers
from headrace.runner.part import RunnerPart, StepHandle
from headrace.runner.slots import RowArrays
from headrace.sampling.device import to_host


@dataclasses.dataclass(frozen=True)
class RecordedExperts:
    """Choices for tokens of some rows, on their way to the host."""

    seq_ids: list[int]
    ends: list[int]
    """Place behind the last token of each sequence in ``experts``."""
    experts: torch.Tensor
    """``[tokens, layers, top_k]``"""
    weights: torch.Tensor | None
    """The same, float32; None: they are not recorded."""

    def lists(self) -> dict[int, bytes]:
        """seq_id -> its tokens' choices: of each its ids, in the form of ``RoutedExperts.data``, and then its weights."""
        recorded = [self.experts] if self.weights is None else [self.experts, self.weights]
        data = np.concatenate([one.flatten(1).numpy().view(np.uint8) for one in recorded], axis=1)
        starts = [0, *self.ends]
        return {seq: data[start:end].tobytes() for seq, start, end in zip(self.seq_ids, starts, self.ends, strict=False)}


class ExpertRecorder(RunnerPart):
    """Gives each router a part of one buffer, which every step overwrites, replayed steps too."""

    memory_label = "routed experts"

    def __init__(self, model: nn.Module, shape: ExpertLayers, config: EngineConfig, buffers: StepBuffers) -> None:
        self._buffers = buffers
        routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        scheduler = config.scheduler
        # A captured step is padded to its graph's rows.
        most = scheduler.max_num_batched_tokens + buffers.num_logits_rows + PROMPT_ROWS
        dtype = torch.int16 if shape.wide else torch.uint8
        self._experts = torch.zeros(len(shape.layers), most, shape.top_k, dtype=dtype, device=config.device)
        """``[layers, tokens of a step, top_k]``"""
        self._weights = torch.zeros(self._experts.shape, device=config.device) if shape.weighted else None
        for index, router in enumerate(routers):
            router.record = self._experts[index, :, : router.spec.top_k]
            router.record_weights = None if self._weights is None else self._weights[index, :, : router.spec.top_k]
        self._wanted = np.zeros(scheduler.max_num_seqs, dtype=np.bool_)
        """slot -> whether its sequence asks."""

    @property
    def nbytes(self) -> int:
        return self._experts.nbytes + (0 if self._weights is None else self._weights.nbytes)

    def release(self, slots: Sequence[int]) -> None:
        self._wanted[list(slots)] = False

    def begin(self, plan: StepPlan) -> None:
        for seq in plan.new:
            self._wanted[seq.slot] = seq.sampling.return_routed_experts

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        wanted = np.flatnonzero(self._wanted[rows.slots])
        if not len(wanted):
            return
        starts = self._buffers.query_start(step.num_places)[step.places[wanted]]
        counts = rows.counts[wanted]
        ends = np.cumsum(counts)
        tokens = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
        places = upload(tokens, self._experts.device)

        def taken(recorded: torch.Tensor) -> torch.Tensor:
            return to_host(recorded.index_select(1, places).transpose(0, 1).contiguous())

        weights = None if self._weights is None else taken(self._weights)
        step.routed.append(RecordedExperts(rows.seq_ids[wanted].tolist(), ends.tolist(), taken(self._experts), weights))
