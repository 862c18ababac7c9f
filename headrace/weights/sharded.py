"""Checkpoints that tensor-parallel ranks saved, each its own part of every matrix: put together again as they are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from headrace.errors import ConfigError
from headrace.model_spec import DenseSpec, ModelSpec
from headrace.model_spec.projection import GROUPED, grouped_rows, input_matrices
from headrace.parallel.shards import Cut, attention_cuts, dense_cuts, join, shard_attention
from headrace.weights.checkpoint import Checkpoint, StoredTensor
from headrace.weights.names import StoredLayout
from headrace.weights.safetensors import SafetensorsCheckpoint

_RANK_FILE = re.compile(r"model-rank-(\d+)-part-\d+\.safetensors")
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(self_attn|mlp)\.(\w+?)(?:_proj)?(?:\.(weight|bias))?")
_VOCABULARY = re.compile(r"(?:model\.)?(?:embed_tokens|lm_head)\.weight")


def is_sharded(files: Sequence[Path]) -> bool:
    """True if the files are named as those of a checkpoint that ranks saved: ``model-rank-R-part-P.safetensors``."""
    return bool(files) and all(_RANK_FILE.fullmatch(file.name) for file in files)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """Assembly of one tensor from the ranks' parts."""

    segments: tuple[tuple[Cut, ...], ...]
    """The matrices in each rank's part, in order, each with the cuts of all ranks; empty: all ranks hold the whole tensor."""
    rows: int | None = None
    """Rows of the whole that are real; the rest is padding of a vocabulary."""
    grouped: tuple[StoredLayout, StoredLayout] | None = None
    """Layouts of each rank's part and of the whole, for matrices interleaved by KV group."""


class ShardedCheckpoint(Checkpoint):
    """Files ``model-rank-R-part-P.safetensors`` of ranks 0 to N - 1, whose tensors have the names of a whole model's.

    Each matrix is cut by its own width, as ``headrace.parallel.shards`` says, or in fused ones (``qkv_proj``,
    ``gate_up_proj``) each of its matrices is. A rank's part of one that is interleaved by KV group holds the groups of that
    rank; one that shares a KV head with its neighbours has its own query heads and that head.

    Raises:
        ConfigError: a rank is missing or lacks a tensor, or a part is not of the size that the model's layers mean.
    """

    def __init__(self, files: Sequence[Path], spec: ModelSpec) -> None:
        by_rank: dict[int, list[Path]] = {}
        for file in files:
            rank = int(_RANK_FILE.sub(r"\1", file.name))
            by_rank.setdefault(rank, []).append(file)
        if sorted(by_rank) != list(range(len(by_rank))):
            raise ConfigError(f"the checkpoint has the parts of ranks {sorted(by_rank)}: one is missing", "model")
        self._spec = spec
        self._ranks = [SafetensorsCheckpoint(by_rank[rank]) for rank in range(len(by_rank))]
        self._wholes: dict[str, _Whole] = {}
        self.tensors: Mapping[str, StoredTensor] = {name: self._describe(name) for name in self._ranks[0].tensors}

    def _describe(self, name: str) -> StoredTensor:
        lacking = [rank for rank, one in enumerate(self._ranks) if name not in one.tensors]
        if lacking:
            raise ConfigError(f"the part of rank {lacking[0]} lacks {name}", "model")
        parts = [one.tensors[name] for one in self._ranks]
        whole = self._wholes[name] = _whole(name, self._spec, [part.shape for part in parts])
        shape, nbytes = parts[0].shape, sum(part.nbytes for part in parts)
        if whole.segments:
            axis = 0 if whole.segments[0][0].along == "outputs" else len(shape) - 1
            for rank, part in enumerate(parts):
                means = sum(cuts[rank].stop - cuts[rank].start for cuts in whole.segments)
                if part.shape[axis] != means:
                    raise ConfigError(
                        f"{name} of rank {rank} ({part.origin}) has the shape {list(part.shape)}, but of {len(parts)} ranks "
                        f"each holds {means} along axis {axis}",
                        "model",
                    )
            size = whole.rows if whole.rows is not None else sum(cuts[0].whole for cuts in whole.segments)
            shape = (*shape[:axis], size, *shape[axis + 1 :])
        return dataclasses.replace(parts[0], shape=shape, nbytes=nbytes)

    def _whole(self, name: str) -> torch.Tensor:
        whole = self._wholes[name]
        if not whole.segments:
            return self._ranks[0].read(name)
        parts = [one.read(name) for one in self._ranks]
        if whole.grouped is not None:
            parts = [whole.grouped[0].take(part) for part in parts]
        joined, at = [], [0] * len(parts)
        for cuts in whole.segments:
            pieces = []
            for rank, (cut, part) in enumerate(zip(cuts, parts, strict=True)):
                axis = 0 if cut.along == "outputs" else part.ndim - 1
                pieces.append(part.narrow(axis, at[rank], cut.stop - cut.start))
                at[rank] += cut.stop - cut.start
            joined.append(join(cuts, pieces))
        if whole.grouped is not None:
            return whole.grouped[1].give(torch.cat(joined))
        return torch.cat(joined)[: whole.rows] if len(joined) > 1 or whole.rows is not None else joined[0]

    def close(self) -> None:
        for one in self._ranks:
            one.close()


def _whole(name: str, spec: ModelSpec, shapes: Sequence[tuple[int, ...]]) -> _Whole:
    """Describes the ranks' parts of a tensor."""
    size = len(shapes)
    if _VOCABULARY.fullmatch(name):
        rows = shapes[0][0]
        cuts = tuple(Cut("outputs", rank * rows, (rank + 1) * rows, size * rows) for rank in range(size))
        return _Whole((cuts,), spec.vocab_size)
    match = _LAYER.fullmatch(name)
    if match is None:
        return _Whole(())
    layer, part, matrix, kind = int(match[1]), match[2], match[3], match[4]
    grouped = None
    if layer >= spec.num_layers:
        return _Whole(())
    if part == "self_attn":
        attention = spec.layers[layer]
        by_rank = [attention_cuts(attention, rank, size) for rank in range(size)]
        if matrix in GROUPED:
            local = shard_attention(attention, size)
            grouped = StoredLayout(partial(grouped_rows, local)), StoredLayout(partial(grouped_rows, attention))
        fused = matrix == "qkv" or grouped is not None
        members = tuple(one.name for one in input_matrices(attention)) if fused else (matrix,)
    else:
        mlp = spec.mlps[layer]
        if not isinstance(mlp, DenseSpec):
            raise ConfigError(f"layer {layer}: parts of a mixture of experts that ranks saved are not read", "model")
        by_rank = [dense_cuts(mlp, rank, size) for rank in range(size)]
        members = ("gate", "up") if matrix == "gate_up" else (matrix,)
    if any(member not in by_rank[0] for member in members) or (kind == "bias" and by_rank[0][members[0]].along == "inputs"):
        return _Whole(())
    return _Whole(tuple(tuple(cuts[member] for cuts in by_rank) for member in members), grouped=grouped)
