"""The report of an engine: what it was built from, layer by layer, and where the memory goes."""

from __future__ import annotations

from headrace.attention import select
from headrace.config import EngineConfig
from headrace.engine import environment
from headrace.engine.info import DecisionLine, EngineInfo, LayerLine, MemoryLine, StartupPhase
from headrace.resolve import DETERMINISTIC, DeviceFacts
from headrace.sources.files import ModelFiles
from headrace.spec import layer_kv


def engine_info(
    files: ModelFiles, config: EngineConfig, device: DeviceFacts, phases: list[StartupPhase], memory: list[MemoryLine]
) -> EngineInfo:
    """What the engine tells about itself."""
    return EngineInfo(
        model=files.name,
        architecture=config.model.architecture,
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        block_size=config.cache.block_size,
        num_blocks=list(config.cache.num_blocks),
        dtype=config.dtype,
        quantization=config.quantization,
        device=config.device,
        timeline=phases,
        memory=memory,
        layers=_layer_lines(config),
        decisions=[DecisionLine(decision.name, decision.value, decision.reason) for decision in config.decisions],
        environment=environment.describe(device, config.num_threads),
    )


def _layer_lines(config: EngineConfig) -> list[LayerLine]:
    lines = []
    for spec, backend in zip(config.model.layers, config.attention_backends, strict=True):
        asked = config.args.attention_backend
        reason = DETERMINISTIC
        if not config.args.deterministic:
            _, reason = select.choose(spec, config.device, config.dtype, asked, config.cache.dtype)
        if spec.latent is not None:
            prompts = select.for_prompts(spec, backend, config.device, config.dtype)
            when = f"uncompressed, for {prompts}, where that is less work" if prompts else "absorbed as decode rows are"
            reason = f"{reason}; prompts are {when}"
        lines.append(
            LayerLine(
                layer=spec.layer,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                v_head_dim=spec.v_head_dim,
                window=spec.window,
                kv_bytes_per_token=layer_kv(spec, config.cache.dtype).bytes_per_token,
                backend=backend,
                reason=reason,
                rotary_dim=spec.rotary_dim,
                soft_cap=spec.soft_cap,
                sinks=spec.sinks,
                kv_source=spec.kv_source,
                latent=spec.latent is not None,
            )
        )
    return lines
