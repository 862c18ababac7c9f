"""Whether and how prompts attend sparsely, and which layers can."""

from __future__ import annotations

import dataclasses

from headrace.attention import selectors
from headrace.attention.select import modes_of
from headrace.attention.sparse import SparsePrefillAttention
from headrace.config import EngineArgs, SparseConfig
from headrace.errors import ConfigError, ranges
from headrace.model_spec import AnySpec, AttentionSpec, ElasticSpec, ModelSpec, RopeSpec
from headrace.resolve.facts import DecisionLog

MIN_TOKENS = 8192
MAX_EXACT_TOKENS = 131_072
SINK_BLOCKS, LOCAL_BLOCKS = 2, 4
"""Blocks that the mean selector keeps in any case: 256 and 512 tokens."""
_ELASTIC = "elastic attention"
_OPTIONS = ("sparse_threshold", "sparse_selection", "sparse_min_tokens", "elastic_max_exact_tokens")


def sparse(
    args: EngineArgs,
    model: AnySpec,
    device: str,
    dtype: str,
    kv_dtype: str,
    num_batched: int,
    max_model_len: int,
    log: DecisionLog,
) -> SparseConfig | None:
    """None: every prompt attends densely.

    Raises:
        ConfigError: it cannot be as the arguments say; names the parameter.
    """
    elastic = model.elastic
    if args.sparse_prefill == "off" or (args.sparse_prefill == "auto" and elastic is None):
        _refuse_without_effect(args)
        _note_off(model, device, dtype, kv_dtype, log)
        return None
    if args.deterministic:
        raise ConfigError(
            "deterministic is for dense attention: which kernel attends to a sparse prompt depends on the rows beside it; set "
            "sparse_prefill off",
            "sparse_prefill",
        )
    config = _training_free(args) if args.sparse_prefill != "auto" or elastic is None else _routed(args, elastic, max_model_len)
    kv_heads, ranks = min(layer.num_kv_heads for layer in _whole(model).layers), args.tensor_parallel_size
    if config.routed and kv_heads < ranks:
        raise ConfigError(
            f"the model's router decides for each of {kv_heads} KV heads, and {ranks} ranks would hold the same ones, which "
            "they may route otherwise by rounding; set sparse_prefill off",
            "tensor_parallel_size",
        )
    beside = args.max_prefill_tokens_beside_decode
    for name, limit in (("max_num_batched_tokens", num_batched), ("max_prefill_tokens_beside_decode", beside)):
        if limit is not None and limit < config.block:
            raise ConfigError(f"sparse prefill takes chunks of {config.block} tokens: {name} is {limit}", name)
    if args.sparse_selection == "upstream" and not (config.selects and config.selector.by_length):
        raise ConfigError(
            "sparse_selection upstream is a rule for XAttention's estimate, by which no head of this model selects blocks",
            "sparse_selection",
        )
    config = dataclasses.replace(config, heads=_heads(args, model, config, device, dtype, kv_dtype, log))
    _note(args, config, elastic, log)
    return config


def _whole(model: AnySpec) -> AnySpec:
    """The model of all ranks."""
    return model.shard.whole if isinstance(model, ModelSpec) and model.shard is not None else model


def _note_off(model: AnySpec, device: str, dtype: str, kv_dtype: str, log: DecisionLog) -> None:
    """Says which layers could attend sparsely."""
    if model.elastic is not None:
        log.note(_ELASTIC, "off", "sparse_prefill off: every prompt attends densely, whatever the router would decide")
        return
    reasons = [SparsePrefillAttention.supports(spec, device, dtype, kv_dtype, modes_of(model)) for spec in model.layers]
    could, dense = sum(not each for each in reasons), _dense_layers(reasons)
    rest = "".join(f"; not {layers}: {why}" for why, layers in dense.items())
    log.note("sparse_prefill", "off", f"{could} of {len(reasons)} layers could attend sparsely in prompts{rest}")


def _dense_layers(reasons: list[list[str]]) -> dict[str, str]:
    """Reason -> the layers that stay dense for it, as text."""
    layers: dict[str, list[int]] = {}
    for index, why in enumerate(reasons):
        if why:
            layers.setdefault(", ".join(why), []).append(index)
    return {why: f"layer{'s' * (len(numbers) > 1)} {ranges(numbers)}" for why, numbers in layers.items()}


def _refuse_without_effect(args: EngineArgs) -> None:
    defaults = EngineArgs()
    for name in _OPTIONS:
        if getattr(args, name) != getattr(defaults, name):
            raise ConfigError(f"{name} has no effect: prompts of this model attend densely (sparse_prefill)", name)


def _routed(args: EngineArgs, spec: ElasticSpec, max_model_len: int) -> SparseConfig:
    most = args.elastic_max_exact_tokens
    if most is not None and most < 2 * spec.block:
        raise ConfigError(
            f"elastic_max_exact_tokens {most} is less than two blocks of {spec.block} tokens", "elastic_max_exact_tokens"
        )
    return SparseConfig(
        selector=selectors.configure("xattn", args, spec),
        types=spec.types,
        heads=(),
        min_tokens=args.sparse_min_tokens or 0,
        max_exact_tokens=most or max(2 * spec.block, min(MAX_EXACT_TOKENS, max_model_len)),
        block=spec.block,
        sink_blocks=spec.sink_blocks,
        local_blocks=spec.local_blocks,
    )


def _training_free(args: EngineArgs) -> SparseConfig:
    if args.elastic_max_exact_tokens is not None:
        raise ConfigError(
            f"elastic_max_exact_tokens is for a model's own router, and sparse_prefill is {args.sparse_prefill}",
            "elastic_max_exact_tokens",
        )
    return SparseConfig(
        selector=selectors.configure(args.sparse_prefill, args, None),
        types=None,
        heads=(),
        min_tokens=MIN_TOKENS if args.sparse_min_tokens is None else args.sparse_min_tokens,
        max_exact_tokens=0,
        block=ElasticSpec.block,
        sink_blocks=SINK_BLOCKS,
        local_blocks=LOCAL_BLOCKS,
    )


def _heads(
    args: EngineArgs, model: AnySpec, config: SparseConfig, device: str, dtype: str, kv_dtype: str, log: DecisionLog
) -> tuple[int, ...]:
    """Returns ``SparseConfig.heads``."""
    reasons = [SparsePrefillAttention.supports(spec, device, dtype, kv_dtype, modes_of(model)) for spec in model.layers]
    if all(reasons):
        raise ConfigError(f"no layer of this model can attend sparsely: {reasons[0][0]}", "sparse_prefill")
    if config.routed and any(reasons):
        layer = next(index for index, why in enumerate(reasons) if why)
        raise ConfigError(
            f"layer {layer} cannot attend as its router decides: {reasons[layer][0]}; set sparse_prefill off", "sparse_prefill"
        )
    for why, layers in _dense_layers(reasons).items():
        log.note("sparse_prefill", f"not in {layers}", why)
    return tuple(0 if why else spec.num_heads for spec, why in zip(_whole(model).layers, reasons, strict=True))


def _note(args: EngineArgs, config: SparseConfig, elastic: ElasticSpec | None, log: DecisionLog) -> None:
    count, total = sum(heads > 0 for heads in config.heads), len(config.heads)
    where = "every layer" if count == total else f"{count} of {total} layers"
    if config.routed and elastic is not None:
        log.note(
            _ELASTIC,
            f"{elastic.retrieval_mode} and {elastic.toggle_type} heads",
            f"{where}: the model's router decides for each prompt; threshold {config.selector.threshold}",
        )
        if args.elastic_max_exact_tokens is None:
            why = "prompts up to this length are routed as a whole, beside others a few layers a step; longer ones in segments"
            log.note("elastic_max_exact_tokens", config.max_exact_tokens, why)
        return
    why = f"{where}, prompts from {config.min_tokens} tokens on, threshold {config.selector.threshold}"
    log.note("sparse_prefill", config.selector.name, why)


def with_yarn_factor(args: EngineArgs, model: AnySpec, log: DecisionLog) -> AnySpec:
    """The model with the factor of YaRN that the arguments ask for.

    Raises:
        ConfigError: they ask for what the model's config does not say.
    """
    ropes: set[RopeSpec] = {layer.rope for layer in model.layers if layer.rope is not None and layer.rope.kind == "yarn"}
    if not ropes:
        if args.yarn_factor != "checkpoint":
            why = "and this one has none" if isinstance(model, ModelSpec) else "and this one's library computes its own"
            raise ConfigError(f"yarn_factor {args.yarn_factor} is for native models with YaRN, {why}", "yarn_factor")
        return model
    other: dict[RopeSpec | None, RopeSpec] = {}
    for rope in ropes:
        fields = rope.parameters
        positions = fields["max_position_embeddings"] / fields["original_max_position_embeddings"]
        factor = fields.get("factor") or positions
        if args.yarn_factor == "positions":
            why = f"max_position_embeddings / original_max_position_embeddings; the config's factor is {fields.get('factor')}"
            log.note("rotary embedding", f"yarn, factor {positions:g}", why)
            other[rope] = dataclasses.replace(rope, parameters={**fields, "factor": positions})
        elif model.elastic is not None:
            same = "the positions say the same" if factor == positions else f"the positions mean {positions:g} (yarn_factor)"
            log.note("rotary embedding", f"yarn, factor {factor:g}", f"the config's; {same}")
    if not other:
        return model
    layers = tuple(_turned(each, other[each.rope]) if each.rope in other else each for each in model.layers)
    longest = min(int(rope.parameters["max_position_embeddings"]) for rope in ropes)
    return dataclasses.replace(model, layers=layers, max_position=min(model.max_position, longest))


def _turned(layer: AttentionSpec, rope: RopeSpec) -> AttentionSpec:
    """The layer with another rotary embedding, which sets the scale of MLA too."""
    scale = (
        layer.scale if layer.mla is None or layer.rope is None else layer.scale / layer.rope.logit_factor * rope.logit_factor
    )
    return dataclasses.replace(layer, rope=rope, scale=scale)
