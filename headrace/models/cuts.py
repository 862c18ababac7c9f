"""Parts that a tensor-parallel rank holds of each parameter of a native model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.layers.linear import Linear, RowParallelLinear
from headrace.layers.mlp import GatedMLP, SquaredMLP
from headrace.layers.moe import Experts, MoeMLP
from headrace.layers.norm import ShardedRMSNorm
from headrace.layers.short_conv import StateMixer
from headrace.model_spec import AttentionSpec, DenseSpec, MoeSpec, Shard
from headrace.models.decoder import Decoder, DecoderAttention
from headrace.parallel.shards import Cut, attention_cuts, dense_cuts, state_cuts
from headrace.weights.names import NameTable, ParameterCut


def shard_table(table: NameTable, whole: Decoder, part: Decoder, shard: Shard) -> NameTable:
    """The checkpoint names of a rank's parameters.

    Args:
        table: of the whole model.
        whole, part: the whole model and the rank's, on the meta device.

    Raises:
        ConfigError: as ``checked_cuts``.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}
    return table.sharded(checked_cuts(whole, part, shard), shapes)


def checked_cuts(whole: Decoder, part: Decoder, shard: Shard) -> dict[str, ParameterCut]:
    """``parameter_cuts`` that give what the rank's modules hold.

    Raises:
        ConfigError: a parameter of the rank is a part of the whole one that no cut gives; names it.
    """
    cuts = parameter_cuts(whole, shard, part.spec.mlps)
    wholes = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        shape, cut = list(wholes[name].shape), cuts.get(name)
        if cut is not None:
            shape[cut.axis] = sum(stop - start for start, stop in cut.ranges) + cut.padding
        if shape != list(parameter.shape):
            raise ConfigError(
                f"{name} cannot be split over {shard.size} ranks: a rank has {list(parameter.shape)} of it, and "
                + (f"no cut of {list(wholes[name].shape)} is known" if cut is None else f"the cut gives {shape}"),
                "tensor_parallel_size",
            )
    return cuts


def parameter_cuts(whole: Decoder, shard: Shard, mlps: Sequence[DenseSpec | MoeSpec]) -> dict[str, ParameterCut]:
    """Returns the cuts by parameter, of those that are not held whole."""
    cuts = _vocabulary_cuts(whole, shard)
    for index, (layer, block) in enumerate(zip(whole.layers, whole.spec.blocks, strict=True)):
        here, mlp = f"layers.{index}", mlps[index]
        if block.attention is not None:
            spec = whole.spec.layers[block.attention]
            cuts |= _attention(f"{here}.self_attn", layer.get_submodule("self_attn"), spec, shard)
        for path, module in layer.named_modules():
            if isinstance(module, StateMixer):
                cuts |= _state(f"{here}.{path}", module, shard)
            elif isinstance(module, GatedMLP | SquaredMLP):
                cuts |= _dense(f"{here}.{path}", module, shard)
            elif isinstance(module, Experts) and isinstance(mlp, MoeSpec):
                own = mlp.vision if mlp.vision is not None and module.spec.vision is None else mlp
                cuts |= _experts(f"{here}.{path}", module, own, shard)
    return cuts


def _attention(path: str, attention: nn.Module, spec: AttentionSpec, shard: Shard) -> dict[str, ParameterCut]:
    matrices = attention_cuts(spec, shard.rank, shard.size)
    cuts: dict[str, ParameterCut] = {}
    for name, module in attention.named_children():
        if isinstance(attention, DecoderAttention) and name == "qkv_proj":
            cuts |= _outputs(f"{path}.{name}", module, [matrices[matrix] for matrix in attention.matrices])
        elif name == "o_proj" and isinstance(module, Linear):
            cuts |= _inputs(f"{path}.{name}", module, matrices["o"], shard)
        elif isinstance(module, ShardedRMSNorm):
            cuts |= _outputs(f"{path}.{name}", module, [matrices[name.removesuffix("_norm")]])
        elif name in ("q_proj", "q_b_proj", "kv_b_proj"):
            matrix = matrices["kv_b" if name == "kv_b_proj" else "q"]
            cuts |= _outputs(f"{path}.{name}", module, [matrix])
        elif name == "q_gate_proj":
            cuts |= _outputs(f"{path}.{name}", module, [matrices["q"], matrices["gate"]])
        elif name == "g_proj":
            q = matrices["q"]
            width = q.whole // spec.num_heads
            cuts |= _outputs(f"{path}.{name}", module, [Cut("outputs", q.start // width, q.stop // width, spec.num_heads)])
    if "index" in matrices:
        cuts |= _outputs(f"{path}.indexer.q_proj", attention.get_submodule("indexer.q_proj"), [matrices["index"]])
    if spec.sinks:
        cuts[f"{path}.attention.sinks"] = _ranges(0, [matrices["sinks"]])
    return cuts


def _state(path: str, mixer: StateMixer, shard: Shard) -> dict[str, ParameterCut]:
    channels = state_cuts(mixer.spec, shard.rank, shard.size)
    cuts = _inputs(f"{path}.out_proj", mixer.out_proj, channels["values"], shard)
    for name, parts in mixer.outputs.items():
        own, held = [channels[part] for part in parts], getattr(mixer, name)
        if isinstance(held, nn.Module):
            cuts |= _outputs(f"{path}.{name}", held, own)
        elif held is not None:
            cuts[f"{path}.{name}"] = _ranges(0, own)
    return cuts


def _vocabulary_cuts(whole: Decoder, shard: Shard) -> dict[str, ParameterCut]:
    size = whole.spec.vocab_size
    start, stop = (min(row, size) for row in (shard.vocab_start, shard.vocab_start + shard.vocab_rows))
    cut = ParameterCut(0, ((start, stop),) if start < stop else (), shard.vocab_rows - (stop - start))
    cuts = {f"lm_head.{kind}": cut for kind, _ in whole.lm_head.named_parameters()}
    return cuts | {"embed_tokens.weight": cut} if shard.cut_embedding else cuts


def _dense(path: str, module: GatedMLP | SquaredMLP, shard: Shard) -> dict[str, ParameterCut]:
    matrices = dense_cuts(module.spec, shard.rank, shard.size)
    if isinstance(module, GatedMLP):
        into = _outputs(f"{path}.gate_up_proj", module.gate_up_proj, [matrices["gate"], matrices["up"]])
    else:
        into = _outputs(f"{path}.up_proj", module.up_proj, [matrices["up"]])
    return into | _inputs(f"{path}.down_proj", module.down_proj, matrices["down"], shard)


def _experts(path: str, module: Experts, own: MoeSpec, shard: Shard) -> dict[str, ParameterCut]:
    if own.held is not None:
        return {f"{path}.{name}": ParameterCut(0, (own.held,)) for name, _ in module.named_parameters()}
    width, whole = own.intermediate_size, module.spec.intermediate_size
    start, stop = shard.rank * width, (shard.rank + 1) * width
    both = ParameterCut(1, ((start, stop), (whole + start, whole + stop)) if own.gated else ((start, stop),))
    cuts = {"gate_up_proj": both, "gate_up_proj_bias": both, "down_proj": ParameterCut(2, ((start, stop),))}
    cuts |= _once("down_proj_bias", module.down_proj_bias, shard)
    return {f"{path}.{name}": cuts[name] for name, _ in module.named_parameters() if name in cuts}


def _outputs(path: str, module: nn.Module, cuts: Sequence[Cut]) -> dict[str, ParameterCut]:
    """Cuts matrices one below the other, each by its own width."""
    starts = [sum(cut.whole for cut in cuts[:index]) for index in range(len(cuts))]
    ranges = tuple((start + cut.start, start + cut.stop) for start, cut in zip(starts, cuts, strict=True))
    return {f"{path}.{kind}": ParameterCut(0, ranges) for kind, _ in module.named_parameters(recurse=False)}


def _inputs(path: str, module: Linear, cut: Cut, shard: Shard) -> dict[str, ParameterCut]:
    """Cuts a matrix with results that are summed over ranks: rank 0 holds its bias, the others zeros."""
    return {f"{path}.weight": _ranges(1, [cut])} | _once(f"{path}.bias", module.bias, shard)


def _once(name: str, bias: torch.Tensor | None, shard: Shard) -> dict[str, ParameterCut]:
    return {} if bias is None or shard.rank == 0 else {name: ParameterCut(0, (), len(bias))}


def _ranges(axis: int, cuts: Sequence[Cut]) -> ParameterCut:
    return ParameterCut(axis, tuple((cut.start, cut.stop) for cut in cuts))


def num_sums(model: Decoder) -> int:
    """Sums over ranks in a step of text: of modules that hold a part of the inputs, of the experts (with those shared by all
    tokens), or of the vocabulary."""
    parallel = [
        path
        for path, module in model.named_modules()
        if isinstance(module, RowParallelLinear | Experts) and not path.endswith(".vision_experts")
    ]
    with_experts = [module for module in model.modules() if isinstance(module, MoeMLP) and module.shared_experts is not None]
    # Norms of q and k share one.
    normed = {path.rpartition(".")[0] for path, module in model.named_modules() if isinstance(module, ShardedRMSNorm)}
    return len(parallel) - len(with_experts) + len(normed) + (model.embed_tokens.start is not None)
