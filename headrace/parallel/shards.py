"""Cutting matrices to the part of each tensor-parallel rank. Pure arithmetic on specs.

Query heads are dealt out evenly, in order. KV heads likewise; where there are more ranks than KV heads each rank holds one
of them, and neighbours hold the same. The value heads and the key heads (or groups) of state layers are dealt out like these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from headrace.errors import ConfigError
from headrace.model_spec import AttentionSpec, DenseSpec, StateSpec
from headrace.model_spec.projection import Matrix, input_matrices, output_matrix


@dataclasses.dataclass(frozen=True)
class Cut:
    """One rank's part of a matrix: ``[start, stop)`` of its outputs or of its inputs, or of a vector's entries."""

    along: Literal["outputs", "inputs"]
    start: int
    stop: int
    whole: int
    """Outputs (or inputs) of the whole matrix."""

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The part of a weight ``[outputs, inputs]`` or a vector ``[outputs]``, a view."""
        return weight.narrow(self._axis(weight), self.start, self.stop - self.start)

    def _axis(self, weight: torch.Tensor) -> int:
        return 0 if self.along == "outputs" else weight.ndim - 1


def join(cuts: Sequence[Cut], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the parts of all ranks. Where parts overlap, the first one counts.

    Args:
        cuts: of every rank, which make up the whole; parts: what each holds.
    """
    pieces, at = [], 0
    for cut, part in zip(cuts, parts, strict=True):
        if cut.stop > at:
            pieces.append(part.narrow(cut._axis(part), at - cut.start, cut.stop - at))
            at = cut.stop
    return torch.cat(pieces, dim=cuts[0]._axis(parts[0]))


def shard_attention(spec: AttentionSpec, size: int) -> AttentionSpec:
    """The layer as each of ``size`` ranks sees it: fewer heads, the same widths.

    Raises:
        ConfigError: the heads cannot be dealt out; names the layer.
    """
    where = f"layer {spec.layer}"
    if spec.num_heads % size:
        raise ConfigError(f"{where}: {spec.num_heads} query heads cannot be dealt to {size} ranks", "tensor_parallel_size")
    if spec.mla is not None:
        # All heads share the latent, which every rank keeps, and the indexer's choice, which every rank makes.
        return dataclasses.replace(spec, num_heads=spec.num_heads // size)
    if spec.num_kv_heads % size and size % spec.num_kv_heads:
        raise ConfigError(f"{where}: {spec.num_kv_heads} KV heads cannot be dealt to {size} ranks", "tensor_parallel_size")
    indexer = spec.indexer
    if indexer is not None:
        indexer = dataclasses.replace(indexer, num_heads=max(1, indexer.num_heads // size))
    kv_heads = max(1, spec.num_kv_heads // size)
    return dataclasses.replace(spec, num_heads=spec.num_heads // size, num_kv_heads=kv_heads, indexer=indexer)


def attention_cuts(spec: AttentionSpec, rank: int, size: int) -> dict[str, Cut]:
    """Returns the cuts of a rank in a layer, by matrix (q, gate, k, v, o) and ``sinks``, each by its heads and width; and
    ``index``, the queries of an indexer whose heads choose for KV heads of their own.

    A layer with a latent KV has q, gate, o and ``kv_b``, the projection from the latent. Norms of q and k, and the bias of
    o_proj, which is added once, are not cut.
    """
    local = shard_attention(spec, size)
    first = rank * local.num_heads
    if (mla := spec.mla) is not None:
        widths = {"q": mla.head_dim, "kv_b": mla.head_dim - spec.rotary_dim + mla.v_head_dim, "o": mla.v_head_dim}
        if spec.output_gate:
            widths["gate"] = mla.v_head_dim
        whole = {name: Matrix(name, spec.num_heads, width) for name, width in widths.items()}
        return {name: _heads(matrix, first, local.num_heads) for name, matrix in whole.items()}
    kv_first = rank * spec.num_kv_heads // size
    cuts = {}
    for matrix, mine in zip(input_matrices(spec), input_matrices(local), strict=True):
        cuts[matrix.name] = _heads(matrix, kv_first if matrix.name in ("k", "v") else first, mine.heads)
    cuts["o"] = _heads(output_matrix(spec), first, local.num_heads)
    if spec.indexer is not None and local.indexer is not None:
        heads = Matrix("index", spec.indexer.num_heads, spec.indexer.head_dim)
        cuts["index"] = _heads(heads, rank * spec.indexer.num_heads // size, local.indexer.num_heads)
    if spec.sinks:
        cuts["sinks"] = Cut("outputs", first, first + local.num_heads, spec.num_heads)
    return cuts


def shard_state(spec: StateSpec, size: int) -> StateSpec:
    """The state layer as each of ``size`` ranks sees it: fewer heads, or channels of a short convolution, the same widths.

    Raises:
        ConfigError: they cannot be dealt out; names the layer.
    """
    where = f"state layer {spec.index}"
    count, keys = _state_channels(spec)["values"][0], spec.key_heads
    if count % size:
        what = "channels" if spec.kind == "conv" else "value heads"
        raise ConfigError(f"{where}: {count} {what} cannot be dealt to {size} ranks", "tensor_parallel_size")
    if keys and keys % size and size % keys:
        what = "groups" if spec.kind == "ssd" else "key heads"
        raise ConfigError(f"{where}: {keys} {what} cannot be dealt to {size} ranks", "tensor_parallel_size")
    kept = max(1, keys // size) if keys else 0
    conv = spec.conv
    if conv is not None:
        # Each part by itself: one range of all channels would mix them.
        parts = tuple((name, width // keys * kept if name in _OF_KEYS else width // size) for name, width in conv.parts)
        conv = dataclasses.replace(conv, parts=parts)
    return dataclasses.replace(spec, heads=spec.heads // size, key_heads=kept, conv=conv)


_OF_KEYS = ("q", "k", "B", "C")
"""The parts of convolutions whose channels are those of key heads, or of groups."""


def _state_channels(spec: StateSpec) -> dict[str, tuple[int, int]]:
    """(number, width) of what a state layer's matrices have outputs for."""
    if spec.kind == "conv":
        return {"values": (0 if spec.conv is None else spec.conv.channels, 1)}
    return {"values": (spec.heads, spec.value_dim), "keys": (spec.key_heads, spec.key_dim), "heads": (spec.heads, 1)}


def state_cuts(spec: StateSpec, rank: int, size: int) -> dict[str, Cut]:
    """Returns a rank's part of the channels of a state layer's values and keys (x, or B or C of a group), and of its heads."""
    local = _state_channels(shard_state(spec, size))
    cuts = {}
    for name, (count, width) in _state_channels(spec).items():
        first = rank * count // size
        cuts[name] = Cut("outputs", first * width, (first + local[name][0]) * width, count * width)
    return cuts


def _heads(whole: Matrix, first: int, count: int) -> Cut:
    """Cuts ``count`` heads out of a projection; those of o_proj are its inputs."""
    along: Literal["outputs", "inputs"] = "inputs" if whole.name == "o" else "outputs"
    return Cut(along, first * whole.width, (first + count) * whole.width, whole.size)


def shard_dense(spec: DenseSpec, size: int) -> DenseSpec:
    """The MLP as each of ``size`` ranks sees it.

    Raises:
        ConfigError: it cannot be cut evenly.
    """
    if spec.intermediate_size % size:
        raise ConfigError(f"intermediate_size {spec.intermediate_size} cannot be cut for {size} ranks", "tensor_parallel_size")
    return dataclasses.replace(spec, intermediate_size=spec.intermediate_size // size)


def dense_cuts(spec: DenseSpec, rank: int, size: int) -> dict[str, Cut]:
    """Returns the cuts of a rank in a gated MLP, by matrix (gate, up, down). The bias of down, added once, is not cut."""
    width = shard_dense(spec, size).intermediate_size
    mine = (rank * width, (rank + 1) * width, spec.intermediate_size)
    return {"gate": Cut("outputs", *mine), "up": Cut("outputs", *mine), "down": Cut("inputs", *mine)}
