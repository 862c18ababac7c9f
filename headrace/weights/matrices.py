"""The stored matrices of layers and experts, and a rank's parts of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from headrace.layers.moe import Experts
from headrace.layers.stored import Codes, StoredMatrix
from headrace.parallel.shards import Cut
from headrace.quant.experts import take_experts, take_rows
from headrace.weights.checkpoint import Checkpoint
from headrace.weights.names import NameTable, RankPart, ReadSlice, Target


def stored_experts(checkpoint: Checkpoint, table: NameTable, path: str, layer: Experts) -> Mapping[str, Sequence[StoredMatrix]]:
    """The stored matrices that make up each matrix of a layer, for what they say about their number formats."""
    return {
        matrix: [_whole(checkpoint, name, table.part(name)) for name in table.names(f"{path}.{matrix}")]
        for matrix in layer.shapes
    }


@dataclasses.dataclass(frozen=True)
class CodedTensor:
    """A tensor of a checkpoint that is stored as codes."""

    checkpoint: Checkpoint
    name: str

    def parts(self, target: Target) -> list[StoredMatrix]:
        return stored_parts(self.checkpoint, self.name, target)

    def read(self) -> torch.Tensor:
        """Reads its floats."""
        return self.checkpoint.read(self.name)


def stored_parts(checkpoint: Checkpoint, name: str, target: Target | None, *, split: bool = True) -> list[StoredMatrix]:
    """The matrix of a tensor, or the parts that a rank holds of it; without ``split``, these as one matrix of floats."""
    whole = _whole(checkpoint, name, target)
    if target is None:
        return [whole]
    read, part = partial(checkpoint.read, name), target.part
    if part is None:
        return [StoredMatrix(whole.kind, lambda: target.read(read), partial(_in_order, whole, target), whole.read_spec)]
    if not split:
        return [StoredMatrix(whole.kind, lambda: target.read(read))]
    parts = [_part(whole, target, read, dataclasses.replace(part, ranges=(range_,), padding=0)) for range_ in part.ranges]
    if part.padding:
        padding = dataclasses.replace(part, ranges=())
        parts.append(StoredMatrix(whole.kind, lambda: padding.read(read, None)))
    return parts


def _part(whole: StoredMatrix, target: Target, read: ReadSlice, part: RankPart) -> StoredMatrix:
    """``part``: with one range."""
    codes = partial(_cut, whole, target, *part.ranges[0])
    return StoredMatrix(whole.kind, lambda: part.read(read, target.layout), codes, whole.read_spec)


def load_expert(checkpoint: Checkpoint, name: str, target: Target, experts: Experts, matrix: str) -> None:
    """Loads a tensor that is a matrix of experts, or some of its rows."""
    if experts.method.takes_codes:
        parts = expert_parts(checkpoint, name, target)
    else:
        parts = [(0, one) for one in stored_parts(checkpoint, name, target, split=False)]
    for row, stored in parts:
        experts.method.load(experts, matrix, stored, target.index, target.start + row)


def expert_parts(checkpoint: Checkpoint, name: str, target: Target) -> list[tuple[int, StoredMatrix]]:
    """Cuts a tensor's codes to the parts that a rank holds.

    Returns:
        Parts with consecutive outputs, each with its first row within the target.
    """
    parts, part = stored_parts(checkpoint, name, target), target.part
    if part is None:
        return [(0, parts[0])]
    starts = itertools.accumulate((stop - start for start, stop in part.ranges), initial=0)
    outputs = part.axis == len(part.shape) - 2
    return [(start if outputs else 0, one) for start, one, _ in zip(starts, parts, part.ranges, strict=False)]


def _whole(checkpoint: Checkpoint, name: str, target: Target | None) -> StoredMatrix:
    layout = None if target is None else target.layout
    if layout is not None and (layout.transposed or layout.ones):
        return StoredMatrix(checkpoint.tensors[name].kind, partial(checkpoint.read, name))
    codes, spec = partial(checkpoint.codes, name), partial(checkpoint.spec, name)
    return StoredMatrix(checkpoint.tensors[name].kind, partial(checkpoint.read, name), codes, spec)


def _in_order(whole: StoredMatrix, target: Target) -> Codes | None:
    """The codes, with outputs in the order of the parameter."""
    codes, layout = whole.codes, target.layout
    return codes if codes is None or layout is None or layout.rows is None else take_rows(codes, layout.rows())


def _cut(whole: StoredMatrix, target: Target, start: int, stop: int) -> Codes | None:
    codes, part = _in_order(whole, target), target.part
    if codes is None or part is None:
        return codes
    from_last = len(part.shape) - part.axis
    if from_last > 2:
        return take_experts(codes, start, stop)
    return codes.cut(Cut("inputs" if from_last == 1 else "outputs", start, stop, part.shape[part.axis]))
