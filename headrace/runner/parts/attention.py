"""AttentionWatch: attention weights of prompts whose requests ask for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from headrace.attention.backend import AttentionBackend, AttentionInputs
from headrace.core.plan import StepPlan
from headrace.kernels.attention.reference import first_seen, row_weights
from headrace.pooling_params import PoolingParams
from headrace.runner.part import RunnerPart, StepExtras, StepHandle
from headrace.runner.slots import RowArrays
from headrace.sampling.device import to_host


@dataclasses.dataclass(frozen=True)
class _Watched:
    pooling: PoolingParams
    weights: torch.Tensor
    """``[N, N]`` float32: of each token of the prompt to each."""


class AttentionWatch(RunnerPart):
    """Computes the weights of one layer a second time, by their definition, behind its backend.

    Steps with such prompts run eagerly, with the layers' backends wrapped. The weights are those of dense attention.
    """

    memory_label = "attention weights"

    def __init__(self, backends: Sequence[AttentionBackend], device: torch.device) -> None:
        self._backends, self._device = backends, device
        self._watched: dict[int, _Watched] = {}
        """slot -> its prompt."""

    @property
    def nbytes(self) -> int:
        return sum(watched.weights.nbytes for watched in self._watched.values())

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._watched.pop(slot, None)

    def begin(self, plan: StepPlan) -> None:
        for seq in plan.new:
            if seq.pooling is not None and seq.pooling.method == "attention":
                weights = torch.zeros(seq.prompt_len, seq.prompt_len, device=self._device)
                self._watched[seq.slot] = _Watched(seq.pooling, weights)

    def take(self, rows: RowArrays, extras: StepExtras) -> None:
        if not self._watched:
            return
        backends = list(self._backends)
        for row, slot in enumerate(rows.slots.tolist()):
            if (watched := self._watched.get(slot)) is not None:
                layer = watched.pooling.layer
                backends[layer] = _Watching(backends[layer], self._backends[layer], row, watched)
                extras.context["backends"] = backends

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        if not self._watched:
            return
        for seq_id, slot, end in zip(rows.seq_ids.tolist(), rows.slots.tolist(), rows.ends.tolist(), strict=True):
            watched = self._watched.get(slot)
            if watched is not None and end == len(watched.weights):
                step.pooled.append(([seq_id], to_host(watched.weights.view(1, -1))))


class _Watching(AttentionBackend):
    """Runs a layer's backend, and computes the weights of one row.

    Args:
        inner: runs the layer; it may watch another row.
        planned: has the planned step.
    """

    def __init__(self, inner: AttentionBackend, planned: AttentionBackend, row: int, watched: _Watched) -> None:
        super().__init__(inner.scratch)
        self.name, self._inner, self._planned_backend = inner.name, inner, planned
        self._row, self._watched = row, watched

    def run(self, inputs: AttentionInputs) -> torch.Tensor:
        out = self._inner.run(inputs)
        step, cache, spec = self._planned_backend.step, inputs.cache, inputs.cache.spec
        start, end = step.query_start_host[self._row : self._row + 2].tolist()
        length, head = int(step.seq_lens_host[self._row]), self._watched.pooling.query_head
        first = length - (end - start)
        # Blocks before the window of the row's first query may belong to another row.
        low = int(first_seen(torch.tensor(first), spec.window, spec.chunked))
        blocks = step.block_tables[cache.group][self._row].long()
        keys = cache.keys[blocks].double().flatten(0, 1)[low:length]
        if cache.k_scale is not None:
            keys = keys * cache.k_scale[blocks].flatten(0, 1)[low:length].unsqueeze(-1)
        chosen = range(spec.num_heads) if head is None else (head,)
        for one in chosen:  # A head at a time: all of them would need that many times the memory.
            weights = row_weights(
                inputs.q[start:end, one : one + 1].double(),
                keys[:, one // spec.group_size].unsqueeze(1),
                low,
                scale=spec.scale,
                window=spec.window,
                chunked=spec.chunked,
                soft_cap=spec.soft_cap,
                sinks=None if inputs.sinks is None else inputs.sinks[one : one + 1],
                visible_ends=None if inputs.visible_ends is None else inputs.visible_ends[start:end],
            )
            self._watched.weights[first:length, low:length] += weights[0, 0].float() / len(chosen)
        return out
