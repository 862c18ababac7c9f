"""Assembles an engine: the loop around an executor that is in this process, or that has ranks in others."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from headrace.attention.compiled import held_back
from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.core.plan import GraphCount
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.executor import Executor, LocalExecutor
from headrace.engine.info import EngineInfo
from headrace.engine.outputs import OutputProcessor
from headrace.engine.timeline import Timeline
from headrace.processes.multiprocess import start_ranks
from headrace.runner.graphs import KINDS
from headrace.sampling_params import SamplingParams
from headrace.startup.ledger import ledger
from headrace.startup.loader import load_executor
from headrace.startup.report import engine_info
from headrace.startup.source import FileSource, ModelSource
from headrace.startup.text import ModelText

_WARM_UP_PROMPT = 64
"""Tokens: more than fit in a decode batch's kernels, so that those for prompts are warm too."""
_WARM_UP_OUTPUT = 3
_CAPTURE_SECONDS = 0.5
"""Seconds to capture CUDA graphs before an engine process accepts requests."""
_FLASHINFER_SECONDS = 3.0
"""Seconds of serving before FlashInfer is imported."""


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """The parts that ``load_engine`` builds."""

    core: EngineCore
    info: EngineInfo
    config: EngineConfig
    text: ModelText
    executor: Executor[Any]


def load_engine(source: ModelSource, timeline: Timeline | None = None, *, capture_seconds: float = 20.0) -> LoadedEngine:
    """Finds the model, resolves the configuration, loads, allocates, and serves warm-up requests.

    The model runs in this process, whose number of torch's threads is set, or in those of tensor-parallel ranks.

    Raises:
        ConfigError: the arguments cannot work with this model on this machine.
    """
    args, timeline = source.args, timeline or Timeline()
    with timeline.phase("tokenizer"):
        text = source.text()
    if args.tensor_parallel_size == source.group.size:
        loaded = load_executor(source, text, timeline)
    else:
        source.implementation(text.files)  # Refuses a model that cannot be cut before any process is started.
        with timeline.phase("ranks") as phase:
            loaded = start_ranks(args, args.tensor_parallel_size)
            phase.detail = f"{args.tensor_parallel_size} processes"
    config, executor = loaded.config, loaded.executor
    seconds = capture_seconds if args.graph_capture_seconds is None else args.graph_capture_seconds
    if config.graph_rows:
        with timeline.phase("CUDA graphs") as phase:
            graphs = _capture_graphs(executor, seconds, phase.progress)
            phase.detail = f"{graphs.captured} of {graphs.total}; the others follow while the engine is idle"
        if graphs.failure:
            failed = Decision("CUDA graphs", f"{graphs.captured} graphs" if graphs.captured else "none", graphs.failure)
            others = (line for line in config.decisions if line.name != failed.name)
            config = dataclasses.replace(config, decisions=(*others, failed))
    scheduler = Scheduler(config.scheduler, config.cache)
    outputs = OutputProcessor(text.tokenizer, args.stream_interval, config.experts)
    constraints = text.constraints(args, config.model.vocab_size, lockstep=source.ranks.size > 1)
    core = EngineCore(
        scheduler,
        executor,
        outputs,
        constraints,
        pipeline_depth=config.scheduler.pipeline_depth,
        weights_must_be_complete=args.weights_must_be_complete,
        capture_seconds=seconds,
    )
    with timeline.phase("warm-up"):
        core.warm_up(_warm_up_requests(config))
    memory = ledger(loaded.weights, config, executor.memory(), loaded.profile)
    info = engine_info(text.files, config, loaded.device, timeline.phases, memory)
    return LoadedEngine(core, info, config, text, executor)


def load_core(args: EngineArgs, timeline: Timeline) -> tuple[EngineCore, EngineInfo]:
    """``load_engine`` for the engine process, whose first answer waits for FlashInfer where its kernels are to be in graphs."""
    waits = args.wait_for_kernels or args.attention_backend == "flashinfer"
    with contextlib.nullcontext() if waits else held_back(_FLASHINFER_SECONDS):
        engine = load_engine(FileSource(args), timeline, capture_seconds=_CAPTURE_SECONDS)
    if isinstance(engine.executor, LocalExecutor):
        engine.executor.own_process()
    engine.core.start_threads()
    return engine.core, engine.info


def _capture_graphs(executor: Executor[Any], seconds: float, progress: Callable[[float, str], None]) -> GraphCount:
    """Captures graphs until the time is up, but one of each kind at least, so that the first requests find theirs."""
    end, graphs = time.perf_counter() + seconds, executor.capture_next()
    while graphs.captured < graphs.total and (graphs.captured < KINDS or time.perf_counter() < end):
        progress(graphs.captured / graphs.total, f"{graphs.captured} of {graphs.total}")
        graphs = executor.capture_next()
    return graphs


def _warm_up_requests(config: EngineConfig) -> list[Request]:
    """A greedy and a sampled request, as long as the context allows."""
    room = config.scheduler.max_model_len
    output = min(_WARM_UP_OUTPUT, room - 1)
    prompt = [token % config.model.vocab_size for token in range(min(_WARM_UP_PROMPT, room - output))]
    kinds = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=20, top_p=0.9))
    return [
        Request(
            request_id=f"warm-up-{number}",
            prompt_token_ids=prompt,
            sampling=sampling,
            max_tokens=output,
            seed=number,
            arrival_time=time.monotonic(),
        )
        for number, sampling in enumerate(kinds[: config.scheduler.max_queue_len])
    ]
