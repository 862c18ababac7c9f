"""SparseTables: what the runner knows of prompts that attend sparsely, by slot; and the sparse rows of a step."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace.attention.sparse import streamed_pairs
from headrace.attention.sparse_rows import RoutedRows, SparseRows
from headrace.config import EngineConfig, SparseConfig
from headrace.core.plan import SparseOutcome, StepPlan
from headrace.core.sparse import block_pairs, num_segments, segment_length
from headrace.errors import EngineError
from headrace.kernels.transfer import upload
from headrace.model_spec import POOLED
from headrace.parallel.group import ALONE, Group
from headrace.runner.part import RunnerPart, StepExtras, StepHandle
from headrace.runner.slots import Ints, RowArrays
from headrace.sampling.device import to_host


@dataclasses.dataclass
class SparseResults:
    """Results of a step's sparse rows; on the host once the step has run."""

    seq_ids: list[int]
    kept: torch.Tensor
    """Attended pairs of blocks; see ``SparseRows.kept``."""
    routed: list[int]
    """Rows among these whose heads the router classified."""
    classes: torch.Tensor | None
    """``[N, layers, kv_heads]`` int8, of ``routed``."""

    def outcomes(self) -> dict[int, SparseOutcome]:
        found = dict.fromkeys(range(len(self.seq_ids)), b"")
        if self.classes is not None:
            found |= {row: self.classes[index].numpy().tobytes() for index, row in enumerate(self.routed)}
        kept = self.kept.T.tolist()
        return {seq_id: SparseOutcome(found[row], kept[row]) for row, seq_id in enumerate(self.seq_ids)}


class SparseTables(RunnerPart):
    """Index space: slot, ``[S]``. A rank of several keeps its own heads' classes, and reports and takes those of all heads."""

    def __init__(self, config: EngineConfig, sparse: SparseConfig, device: torch.device, group: Group = ALONE) -> None:
        self._config, self._device, self._group = sparse, device, group
        slots, layers = config.scheduler.max_num_seqs, config.model.layers
        self.num_layers = len(layers)
        self._kv_heads = max(layer.num_kv_heads for layer in layers)
        # Mirrors on the host.
        self._is_sparse = np.zeros(slots, dtype=np.bool_)
        self._decided = np.zeros(slots, dtype=np.bool_)
        self._prompt_len: Ints = np.zeros(slots, dtype=np.int64)
        self._segment: Ints = np.ones(slots, dtype=np.int64)
        """Length of the prompt's segments."""
        self._count: Ints = np.ones(slots, dtype=np.int64)
        """Number of the prompt's segments."""
        self._launched: list[tuple[RowArrays, SparseRows]] = []
        """Sparse rows of the step under way."""
        self._classes: torch.Tensor | None = None
        self._heads: torch.Tensor | None = None
        if sparse.routed:
            longest = config.scheduler.max_model_len
            most = num_segments(longest, segment_length(longest, sparse.max_exact_tokens, sparse.block), sparse.block)
            self._classes = torch.zeros(slots, most, self.num_layers, self._kv_heads, dtype=torch.int8, device=device)
            if most > 1:
                width = max(layer.head_dim for layer in layers)
                self._heads = torch.zeros(slots, self.num_layers, self._kv_heads, width, device=device)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in (self._classes, self._heads) if table is not None)

    def begin(self, plan: StepPlan) -> None:
        """Keeps what is known of new prompts. Raises EngineError for a decision of another shape."""
        for seq in plan.new:
            slot, sparse = seq.slot, self._config
            self._is_sparse[slot] = seq.sparse is not None
            if seq.sparse is None:
                continue
            self._prompt_len[slot] = seq.prompt_len
            most = sparse.max_exact_tokens if sparse.routed else seq.prompt_len
            self._segment[slot] = length = segment_length(seq.prompt_len, most, sparse.block)
            self._count[slot] = count = num_segments(seq.prompt_len, length, sparse.block)
            self._decided[slot] = not sparse.routed or bool(seq.sparse)
            if seq.sparse and self._classes is not None:
                shape = (count, self.num_layers, self._group.size * self._kv_heads)
                if len(seq.sparse) != np.prod(shape):
                    raise EngineError(f"sequence {seq.seq_id} has {len(seq.sparse)} classes of heads, not {shape}")
                classes = np.frombuffer(seq.sparse, dtype=np.int8).reshape(*shape[:2], self._group.size, self._kv_heads)
                self._classes[slot, :count] = upload(classes[:, :, self._group.rank].copy(), self._device)

    def take(self, rows: RowArrays, extras: StepExtras) -> None:
        """Adds the rows that attend sparsely."""
        sparse = self.rows(rows)
        if sparse is not None:
            extras.metadata["sparse"] = sparse
            self._launched.append((rows, sparse))

    def end(self, rows: RowArrays, step: StepHandle) -> None:
        """Launches the transfer of what the step's sparse rows came to."""
        step.sparse += [self.results(*each) for each in self._launched]
        self._launched.clear()

    def rows(self, rows: RowArrays) -> SparseRows | None:
        """The rows that attend sparsely; None: there are none.

        Raises:
            EngineError: the plan breaks the contract.
        """
        is_sparse = self._is_sparse[rows.slots] & (rows.starts < self._prompt_len[rows.slots])
        if not is_sparse.any():
            return None
        first = int(np.argmax(is_sparse))
        self._check(rows, is_sparse, first)
        slots, starts, ends = rows.slots[first:], rows.starts[first:], rows.ends[first:]
        segments = np.minimum(starts // self._segment[slots], self._count[slots] - 1)
        config, device = self._config, self._device
        pairs = [block_pairs(start, end, config.block) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
        streamed = streamed_pairs(starts, ends, config.block, config.sink_blocks, config.local_blocks)
        numbers = upload(
            np.stack([np.array(pairs), streamed, slots, segments, self._prompt_len[slots]]).astype(np.int64), device
        )
        offsets = np.cumsum(rows.counts)[first:] - rows.counts[first:]
        return SparseRows(
            first=first,
            pairs=numbers[0],
            streamed=numbers[1],
            kept=torch.zeros(self.num_layers, len(slots), dtype=torch.int64, device=device),
            slots=numbers[2],
            segments=numbers[3],
            prompt_lens=numbers[4],
            classes=self._classes,
            heads=self._heads,
            routed=self._routed(slots, segments, offsets, rows.counts[first:]),
        )

    def _routed(self, slots: Ints, segments: Ints, offsets: Ints, counts: Ints) -> RoutedRows | None:
        chosen = np.flatnonzero(~self._decided[slots])
        if not len(chosen):
            return None
        keys: list[np.ndarray] = []
        for row in chosen.tolist():
            pooled, start, end = min(POOLED, int(counts[row])), int(offsets[row]), int(offsets[row] + counts[row])
            keys += [np.arange(start, start + (pooled if segments[row] == 0 else 0)), np.arange(end - pooled, end)]
        starts = np.cumsum([0, *map(len, keys)]).astype(np.int32)
        earlier = segments[chosen] > 0
        return RoutedRows(
            slots=upload(slots[chosen], self._device),
            segments=upload(segments[chosen], self._device),
            keys=upload(np.concatenate(keys).astype(np.int64), self._device),
            key_start=upload(starts, self._device),
            earlier=upload(earlier, self._device) if earlier.any() else None,
        )

    def results(self, rows: RowArrays, sparse: SparseRows) -> SparseResults:
        """Launches the transfer of what the sparse rows of a forward pass came to."""
        seq_ids, slots = rows.seq_ids[sparse.first :].tolist(), rows.slots[sparse.first :]
        routed = np.flatnonzero(~self._decided[slots]).tolist()
        classes = None
        if sparse.routed is not None and self._classes is not None:
            own = self._classes[sparse.routed.slots, sparse.routed.segments]
            # [size, N, layers, kv_heads]: ranks hold their heads in order.
            classes = to_host(self._group.all_gather(own).permute(1, 2, 0, 3).flatten(2))
        return SparseResults(seq_ids, to_host(self._group.all_gather(sparse.kept).sum(0)), routed, classes)

    def _check(self, rows: RowArrays, is_sparse: np.ndarray, first: int) -> None:
        """Raises EngineError unless sparse rows are the last, and chunks end where they may."""
        slots, starts, ends = rows.slots[first:], rows.starts[first:], rows.ends[first:]
        block, prompts, length = self._config.block, self._prompt_len[slots], self._segment[slots]
        segments = np.minimum(starts // length, self._count[slots] - 1)
        last = np.where(segments == self._count[slots] - 1, prompts, (segments + 1) * length)
        whole = (starts == segments * length) & (ends == last)
        fine = (starts % block == 0) & (ends <= last) & ((ends % block == 0) | (ends == last)) & (self._decided[slots] | whole)
        if not is_sparse[first:].all() or first < rows.num_decode_rows or not fine.all():
            wrong = first + int(np.argmin(fine & is_sparse[first:]))
            tokens = f"tokens [{rows.starts[wrong]}, {rows.ends[wrong]}) of sequence {rows.seq_ids[wrong]}"
            raise EngineError(
                f"row {wrong} of the plan, {tokens}, is out of order, or not a chunk of a prompt that attends sparsely"
            )
