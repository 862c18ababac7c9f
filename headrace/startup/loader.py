"""Builds an engine from its arguments and reports phases, memory and decisions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

import headrace
from headrace.attention import select
from headrace.attention.flashinfer.kernels import Compiling
from headrace.config import Decision, EngineArgs, EngineConfig, MemoryLine
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.executor import Executor, LocalExecutor
from headrace.engine.info import EngineInfo
from headrace.engine.outputs import OutputProcessor
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError
from headrace.frontend.frontend import Frontend, with_formats, with_image_processor
from headrace.frontend.inputs import InputProcessor
from headrace.layers.linear import make_invariant
from headrace.parallel.agreement import Agreement
from headrace.processes.multiprocess import start_ranks
from headrace.resolve import resolve
from headrace.runner.graphs import GraphCount
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.sources.files import ModelFiles
from headrace.startup import environment
from headrace.startup.ledger import ledger
from headrace.startup.loaded import Loaded
from headrace.startup.profile import measure
from headrace.startup.report import engine_info
from headrace.startup.source import FileSource, ModelSource
from headrace.startup.vision import encoder_calls, load_vision, with_vision
from headrace.text.tokenizer import Tokenizer

_WARM_UP_PROMPT = 64
"""Tokens: more than fit in a decode batch's kernels, so that those for prompts are warm too."""
_WARM_UP_OUTPUT = 3
_CAPTURE_SECONDS = 2.0
"""Seconds to capture CUDA graphs before an engine process accepts requests."""


@dataclasses.dataclass(frozen=True)
class LoadedEngine:
    """The parts that ``load_engine`` builds."""

    core: EngineCore
    inputs: InputProcessor
    info: EngineInfo
    config: EngineConfig
    files: ModelFiles
    tokenizer: Tokenizer | None
    """None with ``skip_tokenizer_init``."""
    executor: Executor[Any]


def load_engine(source: ModelSource, timeline: Timeline | None = None, *, capture_seconds: float = 20.0) -> LoadedEngine:
    """Finds the model, resolves the configuration, loads, allocates, and serves warm-up requests.

    The model runs in this process, whose number of torch's threads is set, or in those of tensor-parallel ranks.

    Raises:
        ConfigError: the arguments cannot work with this model on this machine.
    """
    args, timeline = source.args, timeline or Timeline()
    with timeline.phase("tokenizer"):
        frontend = source.frontend()
    if args.tensor_parallel_size == source.group.size:
        loaded = load_executor(source, frontend, timeline)
    else:
        source.implementation(frontend.files)  # Refuses a model that cannot be cut before any process is started.
        with timeline.phase("ranks") as phase:
            loaded = start_ranks(args, args.tensor_parallel_size)
            phase.detail = f"{args.tensor_parallel_size} processes"
    config, executor, tokenizer = loaded.config, loaded.executor, frontend.tokenizer
    if config.graph_rows:
        seconds = capture_seconds if args.graph_capture_seconds is None else args.graph_capture_seconds
        with timeline.phase("CUDA graphs") as phase:
            graphs = _capture_graphs(executor, seconds, phase.progress)
            phase.detail = f"{graphs.captured} of {graphs.total}; the others follow while the engine is idle"
        if graphs.failure:
            failed = Decision("CUDA graphs", f"{graphs.captured} graphs" if graphs.captured else "none", graphs.failure)
            others = (line for line in config.decisions if line.name != failed.name)
            config = dataclasses.replace(config, decisions=(*others, failed))
    scheduler = Scheduler(config.scheduler, config.cache)
    outputs = OutputProcessor(tokenizer, args.stream_interval)
    constraints = frontend.constraints(args, config.model.vocab_size, lockstep=source.ranks.size > 1)
    core = EngineCore(scheduler, executor, outputs, constraints, pipeline_depth=config.scheduler.pipeline_depth)
    with timeline.phase("warm-up"):
        core.warm_up(_warm_up_requests(config))
    memory = ledger(loaded.weights, config, executor.memory(), loaded.profile)
    info = engine_info(frontend.files, config, loaded.device, timeline.phases, memory)
    inputs = frontend.inputs(args, vocab_size=info.vocab_size, max_model_len=info.max_model_len, media=info.media)
    info = with_image_processor(with_formats(info, inputs.answers), inputs.multimodal)
    return LoadedEngine(core, inputs, info, config, frontend.files, tokenizer, executor)


def load_executor(source: ModelSource, frontend: Frontend, timeline: Timeline) -> Loaded:
    """Loads the model into this process. Processes of ``source.ranks`` do so together.

    Raises:
        ConfigError: as ``load_engine``.
    """
    args, files = source.args, frontend.files
    with timeline.phase("config"):
        device = environment.share(environment.probe(args.device), args.data_parallel_size)
        device = dataclasses.replace(device, available_memory=source.ranks.least(device.available_memory))
        chosen = source.implementation(files)
        files = dataclasses.replace(files, decisions=(*files.decisions, *chosen.decisions))
        config = resolve(args, files, chosen.spec, device)
        torch.set_num_threads(config.num_threads)
    kernels = select.begin_compiling(config.model.layers, config.attention_backends, config.device, config.dtype)
    with timeline.phase("weights") as phase:
        model, report = chosen.load(files, config, phase.bytes)
        phase.detail = f"{report.num_tensors:,} tensors, {report.nbytes_read:,} bytes read"
    encoder, why_encoder = load_vision(files, config, timeline)
    if args.deterministic:
        make_invariant(model)
    profile = None
    if device.cuda:
        with timeline.phase("profile") as phase:
            profile = measure(model, config, encoder_calls(files, config, encoder))
            room = source.ranks.least(profile.room)
            config = resolve(args, files, chosen.spec, device, kv_room=room)
            phase.detail = f"{room:,} bytes left for KV cache"
    config = with_vision(files, config, encoder, why_encoder)
    _check_alike(source.ranks, config)
    with timeline.phase("cache"):
        token_bytes = None if frontend.tokenizer is None else frontend.tokenizer.token_bytes
        executor = LocalExecutor(model, ModelRunner(model, config, token_bytes, encoder=encoder), source.ranks)
    # Before the graphs, which may have them within: captured without, they would be captured again.
    if kernels:
        with timeline.phase("FlashInfer") as phase:
            # Ranks capture the same graphs at the same time, so none may find a kernel ready before the others do.
            phase.detail = _await_kernels(kernels, args.wait_for_kernels or source.group.size > 1)
    weights = list(report.memory)
    if encoder is not None:
        weights.append(MemoryLine("vision encoder", encoder.nbytes))
    decisions = (*config.decisions, *report.decisions)
    if source.group.size > 1:
        decisions = (*decisions, Decision("all-reduce", *source.group.transport))
    config = dataclasses.replace(config, quantization=report.quantization, decisions=decisions)
    return Loaded(executor, config, device, weights, profile)


def _check_alike(ranks: Agreement, config: EngineConfig) -> None:
    """Raises ConfigError if processes that share the model would take other steps."""
    # Layers are not compared: processes may have other numbers of heads.
    parts: dict[str, object] = {"version": headrace.__version__, "cache size": config.cache.nbytes, "dtype": config.dtype}
    parts |= {"vocabulary": config.model.vocab_size, "scheduler": config.scheduler}
    # These do not change which steps are taken.
    args = dataclasses.replace(config.args, record_steps=None, num_threads=None)
    parts |= {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    if ranks.alike(repr(parts).encode()):
        return
    differing = [name for name, value in parts.items() if not ranks.alike(repr(value).encode())]
    why = f"must make their engines with the same arguments; theirs differ in {', '.join(differing)}"
    raise ConfigError(f"the processes that share the model {why}", differing[-1])


def load_core(args: EngineArgs, timeline: Timeline) -> tuple[EngineCore, EngineInfo]:
    """``load_engine`` for the engine process."""
    engine = load_engine(FileSource(args), timeline, capture_seconds=_CAPTURE_SECONDS)
    engine.core.start_threads()
    return engine.core, engine.info


def _await_kernels(kernels: list[Compiling], wait: bool) -> str:
    """The state of kernels that compile in the background; ``wait``: after they are ready."""
    for kernel in kernels:
        kernel.join(None if wait else 0.0)
    pending = sum(kernel.pending for kernel in kernels)
    if pending:
        return f"{pending} of {len(kernels)} kernels are being compiled: headrace's own do their work until then"
    return "; ".join(dict.fromkeys(kernel.outcome for kernel in kernels))


def _capture_graphs(executor: Executor[Any], seconds: float, progress: Callable[[float, str], None]) -> GraphCount:
    """Captures graphs until the time is up."""
    end, graphs = time.perf_counter() + seconds, executor.capture_next()
    while graphs.captured < graphs.total and time.perf_counter() < end:
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
