"""The report of an engine: configuration, attention of each layer, memory."""

from __future__ import annotations

from headrace.attention import select
from headrace.config import EngineConfig, MemoryLine
from headrace.core.request import MediaFacts
from headrace.engine.info import EngineInfo, LayerLine, StartupPhase
from headrace.model_spec import layer_kv
from headrace.quant.registry import title
from headrace.resolve import DeviceFacts
from headrace.resolve.schedule import DETERMINISTIC
from headrace.sources.files import ModelFiles
from headrace.startup import environment

_GEOMETRY = (
    *("layer", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window", "chunked"),
    *("rotary_dim", "soft_cap", "sinks", "kv_source"),
)
"""Fields of ``AttentionSpec`` that the report shows."""


def engine_info(
    files: ModelFiles, config: EngineConfig, device: DeviceFacts, phases: list[StartupPhase], memory: list[MemoryLine]
) -> EngineInfo:
    """The report of an engine, shown at start-up."""
    return EngineInfo(
        model=files.name,
        architecture=config.model.architecture,
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        block_size=config.cache.block_size,
        num_blocks=list(config.cache.num_blocks[: len(config.cache.groups)]),
        state_grid=config.cache.state_grid if config.cache.states is not None else 0,
        dtype=config.dtype,
        quantization=title(config.quantization),
        device=config.device,
        timeline=phases,
        memory=memory,
        layers=_layer_lines(config),
        decisions=list(config.decisions),
        environment=environment.describe(device, config.num_threads),
        media=_media_facts(config),
    )


def _media_facts(config: EngineConfig) -> MediaFacts | None:
    """None: the model reads text alone."""
    model, vision = config.model, config.model.vision
    if vision is None:
        return None
    return MediaFacts(
        model_type=vision.model_type,
        hidden_size=model.hidden_size,
        deepstack_layers=vision.deepstack_layers,
        bidirectional=vision.bidirectional,
        sectioned_rope=model.sectioned_rope,
        max_position=model.max_position,
        max_model_len=config.scheduler.max_model_len,
        max_encoder_rows=config.scheduler.max_num_encoder_tokens,
        max_step_tokens=config.scheduler.max_num_batched_tokens,
        dtype=config.dtype,
    )


def _layer_lines(config: EngineConfig) -> list[LayerLine]:
    lines = []
    for spec, backend in zip(config.model.layers, config.attention_backends, strict=True):
        requested = backend if config.args.deterministic else config.args.attention_backend
        modes = select.modes_of(config.model)
        choice = select.choose(spec, config.device, config.dtype, config.cache.dtype, modes, requested)
        if config.args.deterministic:
            choice = choice._replace(why=DETERMINISTIC)
        geometry = {name: getattr(spec, name) for name in _GEOMETRY}
        kv_bytes = layer_kv(spec, config.cache.dtype).bytes_per_token
        geometry |= {"mla": spec.mla is not None, "indexer": "" if spec.indexer is None else spec.indexer.words}
        lines.append(LayerLine(**geometry, kv_bytes_per_token=kv_bytes, backend=backend, reason=choice.reason))
    return lines
