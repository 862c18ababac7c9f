"""``headrace doctor``: what would be served here, how, and why, without serving it."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from headrace.cli.engine_options import ENGINE
from headrace.cli.options import command
from headrace.config import EngineArgs

if TYPE_CHECKING:
    from headrace.engine.info import EngineInfo


@command(args=ENGINE)
def doctor(
    args: EngineArgs,
    load: Annotated[
        bool,
        typer.Option("--load", help="Also load the weights and run a first step, for the timeline and the memory as they are."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what would be served here, how, and why: environment, decisions, attention layer by layer, memory.

    Without --load it reads no weights: the memory of the weights is then an estimate.
    """
    from headrace.cli.startup import as_json as encoded
    from headrace.cli.startup import print_report

    info = asyncio.run(_loaded(args)) if load else planned(args)
    if as_json:
        sys.stdout.write(encoded(info) + "\n")
        return
    print_report(Console(), info, environment=True)


async def _loaded(args: EngineArgs) -> EngineInfo:
    from headrace.cli.announce import AnnouncedLLM

    llm = AnnouncedLLM(args, Console(stderr=True), report=False)
    try:
        await llm.start()
        return llm.info
    finally:
        await llm.close()


def planned(args: EngineArgs) -> EngineInfo:
    """The report of an engine that was decided upon and not built.

    Raises:
        ConfigError: it could not be built.
    """
    from headrace.attention import select
    from headrace.cache.planes import cache_bytes
    from headrace.engine.environment import describe, probe
    from headrace.engine.info import DecisionLine, EngineInfo, LayerLine, MemoryLine, StartupPhase
    from headrace.models.registry import model_spec
    from headrace.resolve import resolve, weight_bytes
    from headrace.sources.files import find_model
    from headrace.spec import layer_kv

    start = time.perf_counter()
    files = find_model(args)
    model = model_spec(files.config)
    device = probe()
    config = resolve(args, files, model, device)
    layers = [
        LayerLine(
            spec.layer,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.v_head_dim,
            spec.window,
            layer_kv(spec, config.cache.dtype).bytes_per_token,
            *select.choose(spec, config.device, config.dtype, args.attention_backend),
        )
        for spec in model.layers
    ]
    return EngineInfo(
        model=files.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        block_size=config.cache.block_size,
        num_blocks=list(config.cache.num_blocks),
        dtype=config.dtype,
        quantization=config.quantization,
        device=config.device,
        timeline=[StartupPhase("config", time.perf_counter() - start, "the weights were not loaded")],
        memory=[
            MemoryLine(
                "weights", weight_bytes(model, config.dtype, config.quantization), "estimated; --load tells it to the byte"
            ),
            MemoryLine("KV cache", cache_bytes(config.cache), f"{sum(config.cache.num_blocks):,} blocks, null blocks included"),
        ],
        layers=layers,
        decisions=[DecisionLine(d.name, d.value, d.reason) for d in config.decisions],
        environment=describe(device, config.num_threads),
    )
