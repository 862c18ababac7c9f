"""Cutting a ModelSpec to the part of each tensor-parallel rank. Pure arithmetic on specs."""

from __future__ import annotations

import dataclasses

from headrace.errors import ConfigError
from headrace.model_spec import DenseSpec, MlpSpec, ModelSpec, MoeSpec, Shard
from headrace.model_spec.kv import DTYPE_BYTES
from headrace.parallel.shards import shard_attention, shard_dense, shard_state

VOCAB_MULTIPLE = 64
"""A rank holds a multiple of this many rows of the output head."""
SLICE_MULTIPLE = 64
"""Experts are sliced where each rank gets a multiple of this many channels: whole tiles of the kernels, and whole blocks of
MXFP4, which share a scale."""
LARGE_EMBEDDING = 2 << 30
"""Bytes from which on an untied token embedding is cut too, which costs an all-reduce and some small kernels a step."""
MOST_RANKS = 64


@dataclasses.dataclass(frozen=True)
class ParallelSizes:
    """Number of tensor-parallel ranks, and the way in which they share a model."""

    tensor: int = 1
    whole_experts: bool = False
    """Each rank holds whole experts, also where it could hold a slice of every one."""


def shard_model(spec: ModelSpec, rank: int, sizes: ParallelSizes) -> ModelSpec:
    """The part of one rank. With one rank it is the model itself.

    Raises:
        ConfigError: the model cannot be dealt out. Names what cannot, and every size that works.
    """
    if sizes.tensor == 1:
        return spec
    try:
        return _shard(spec, rank, sizes)
    except ConfigError as error:
        works = ", ".join(map(str, workable_sizes(spec)))
        raise ConfigError(f"{error.message}; sizes that work: {works}", "tensor_parallel_size") from error


def largest(spec: ModelSpec) -> ModelSpec:
    """The part of the rank that holds the most, where ``spec`` is that of any rank."""
    shard = spec.shard
    if shard is None:
        return spec
    # Where experts do not divide, the last rank has one more than others.
    return shard_model(shard.whole, shard.size - 1, ParallelSizes(shard.size, shard.whole_experts))


def workable_sizes(spec: ModelSpec) -> list[int]:
    """Every number of ranks that the model can be dealt to."""
    return [size for size in range(1, MOST_RANKS + 1) if _works(spec, ParallelSizes(size))]


def _works(spec: ModelSpec, sizes: ParallelSizes) -> bool:
    try:
        _shard(spec, 0, sizes)
    except ConfigError:
        return False
    return True


def _shard(spec: ModelSpec, rank: int, sizes: ParallelSizes) -> ModelSpec:
    size = sizes.tensor
    rows = -(-spec.vocab_size // (VOCAB_MULTIPLE * size)) * VOCAB_MULTIPLE
    large = spec.vocab_size * spec.hidden_size * DTYPE_BYTES.get(spec.dtype, 2) >= LARGE_EMBEDDING
    shard = Shard(
        rank=rank,
        size=size,
        whole=spec,
        vocab_start=rank * rows,
        vocab_rows=rows,
        whole_experts=sizes.whole_experts,
        cut_embedding=spec.tie_word_embeddings or large,
    )
    layers = tuple(shard_attention(layer, size) for layer in spec.layers)
    states = tuple(shard_state(state, size) for state in spec.states)
    mlps = tuple(_shard_mlp(mlp, layer, rank, sizes) for layer, mlp in enumerate(spec.mlps))
    return dataclasses.replace(spec, layers=layers, states=states, mlps=mlps, shard=shard)


def _shard_mlp(spec: MlpSpec, layer: int, rank: int, sizes: ParallelSizes) -> MlpSpec:
    try:
        if isinstance(spec, DenseSpec):
            return shard_dense(spec, sizes.tensor)
        shared = None if spec.shared is None else shard_dense(spec.shared, sizes.tensor)
        vision = None if spec.vision is None else _shard_experts(spec.vision, layer, rank, sizes)
    except ConfigError as error:
        raise ConfigError(f"layer {layer}: {error.message}", error.param) from None
    return dataclasses.replace(_shard_experts(spec, layer, rank, sizes), shared=shared, vision=vision)


def _shard_experts(spec: MoeSpec, layer: int, rank: int, sizes: ParallelSizes) -> MoeSpec:
    if slices_experts(spec, sizes):
        return dataclasses.replace(spec, intermediate_size=spec.intermediate_size // sizes.tensor)
    count = spec.num_experts
    if count < sizes.tensor:
        raise ConfigError(f"layer {layer}: {count} experts cannot be dealt to {sizes.tensor} ranks", "tensor_parallel_size")
    held = rank * count // sizes.tensor, (rank + 1) * count // sizes.tensor
    return dataclasses.replace(spec, held=held)


def slices_experts(spec: MoeSpec, sizes: ParallelSizes) -> bool:
    """Whether each rank holds a slice of every expert, which keeps ranks equally busy; else it holds whole experts."""
    return not sizes.whole_experts and spec.intermediate_size % (SLICE_MULTIPLE * sizes.tensor) == 0


def describe(spec: ModelSpec) -> list[tuple[str, str, str]]:
    """(name, value, reason) of what a rank holds, for reports. ``spec``: of one rank."""
    shard = spec.shard
    if shard is None:
        return []
    whole, size = shard.whole, shard.size
    found = [("tensor parallelism", f"{size} ranks", "every rank computes a part of each layer; sums over ranks join them")]
    found += _describe_attention(spec, whole, size)
    found += _describe_states(spec, whole, size)
    found += _describe_mlps(spec, whole)
    head = f"rows {shard.vocab_rows:,} of {whole.vocab_size:,}"
    found.append(("output head of a rank", head, f"a multiple of {VOCAB_MULTIPLE}; logits are gathered"))
    if shard.cut_embedding:
        why = "it is tied to the output head" if whole.tie_word_embeddings else "it is large"
        found.append(("token embedding of a rank", head, f"{why}; costs one sum a step"))
    else:
        found.append(("token embedding of a rank", "all", "a copy costs less than a sum a step"))
    return found


def _describe_attention(spec: ModelSpec, whole: ModelSpec, size: int) -> list[tuple[str, str, str]]:
    found = []
    layers = zip(spec.layers, whole.layers, strict=True)
    for heads, kv_heads, of, kv_of in dict.fromkeys(
        (own.num_heads, own.num_kv_heads, all_.num_heads, all_.num_kv_heads) for own, all_ in layers
    ):
        copies = max(1, kv_heads * size // kv_of)
        kept = "each on one rank" if copies == 1 else f"each on {copies} ranks"
        found.append(("heads of a rank", f"{heads} of {of}", f"{kv_heads} of {kv_of} KV heads, {kept}"))
    if any(layer.mla is not None for layer in whole.layers):
        found.append(("latent KV", "on every rank", "heads share it: the KV cache holds no more tokens than that of one rank"))
    return found


def _describe_states(spec: ModelSpec, whole: ModelSpec, size: int) -> list[tuple[str, str, str]]:
    found = []
    numbers = (
        (own.heads, own.key_heads, all_.heads, all_.key_heads) for own, all_ in zip(spec.states, whole.states, strict=True)
    )
    for heads, keys, of, keys_of in dict.fromkeys(numbers):
        if not of:
            found.append(("short convolutions of a rank", f"1 / {size} of the channels", "each channel is on one rank"))
            continue
        kept = "each on one rank" if keys * size <= keys_of else f"each on {keys * size // keys_of} ranks"
        found.append(("heads of a rank's states", f"{heads} of {of}", f"{keys} of {keys_of} key heads or groups, {kept}"))
    return found


def _describe_mlps(spec: ModelSpec, whole: ModelSpec) -> list[tuple[str, str, str]]:
    found = []
    for own, all_ in dict.fromkeys(zip(spec.mlps, whole.mlps, strict=True)):
        if isinstance(own, DenseSpec) or isinstance(all_, DenseSpec):
            found.append(("MLP of a rank", f"{own.intermediate_size:,} of {all_.intermediate_size:,} channels", "a slice"))
        else:
            found.append(_describe_experts("experts of a rank", own, all_))
            if own.vision is not None and all_.vision is not None:
                found.append(_describe_experts("experts of pictures of a rank", own.vision, all_.vision))
    return found


def _describe_experts(name: str, own: MoeSpec, whole: MoeSpec) -> tuple[str, str, str]:
    if own.held is None:
        value = f"{own.intermediate_size:,} of {whole.intermediate_size:,} channels of each expert"
        return name, value, "slices of every expert keep the ranks equally busy"
    why = f"asked for, or {whole.intermediate_size:,} channels do not cut into multiples of {SLICE_MULTIPLE}"
    return name, f"{own.num_held} of {whole.num_experts}, whole", why
