"""Builds an engine from its arguments, and keeps account: how long each phase took, where the memory goes, what was chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from headrace.attention import select
from headrace.attention.flashinfer.kernels import Compiling
from headrace.config import EngineArgs, EngineConfig
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine import environment
from headrace.engine.core import EngineCore
from headrace.engine.frontend import Frontend, load_frontend
from headrace.engine.info import EngineInfo, MemoryLine, Progress, StartupPhase
from headrace.engine.inputs import InputProcessor
from headrace.engine.ledger import ledger
from headrace.engine.outputs import OutputProcessor
from headrace.engine.profile import measure
from headrace.engine.report import engine_info
from headrace.layers.linear import make_invariant
from headrace.models import implementation
from headrace.resolve import resolve
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.sources.files import ModelFiles
from headrace.spec import AnySpec, ForeignSpec
from headrace.text.tokenizer import Tokenizer
from headrace.weights.report import LoadReport

_WARM_UP_PROMPT = 64
"""Tokens: more than fit in a decode batch's kernels, so that those for prompts are warm too."""
_WARM_UP_OUTPUT = 3


@dataclasses.dataclass(frozen=True)
class Engine:
    """Everything that ``load_engine`` built."""

    core: EngineCore
    inputs: InputProcessor
    info: EngineInfo
    config: EngineConfig
    files: ModelFiles
    tokenizer: Tokenizer | None
    """None with ``skip_tokenizer_init``."""
    model: implementation.Built


class _Phase:
    """One phase of a start-up, while it lasts."""

    def __init__(self, name: str, tell: Callable[[Progress], None]) -> None:
        self.detail = ""
        """For the timeline."""
        self._name = name
        self._tell = tell
        self._told = 0.0

    def progress(self, fraction: float | None = None, detail: str = "") -> None:
        """``fraction``: done of the phase, 0 to 1."""
        self._tell(Progress(self._name, fraction, detail))

    def bytes(self, done: int, total: int) -> None:
        """Tells of each hundredth: there may be very many tensors."""
        fraction = done / total if total else 1.0
        if fraction >= self._told + 0.01 or fraction >= 1.0 > self._told:
            self._told = fraction
            self.progress(fraction, f"{done:,} of {total:,} bytes")


class _Timeline:
    """Times the phases of a start-up and tells of them."""

    def __init__(self, on_progress: Callable[[Progress], None] | None) -> None:
        self.phases: list[StartupPhase] = []
        self._tell = on_progress or (lambda progress: None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[_Phase]:
        start = time.perf_counter()
        phase = _Phase(name, self._tell)
        phase.progress()
        yield phase
        self.phases.append(StartupPhase(name, time.perf_counter() - start, phase.detail))


class Given(Protocol):
    """A model that is there already, so that nothing has to be found."""

    @property
    def frontend(self) -> Frontend: ...

    @property
    def implementation(self) -> implementation.Implementation: ...

    def least(self, nbytes: int) -> int:
        """Of what all processes have that share the model."""
        ...

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError if they do not all have the same configuration."""
        ...


def load_engine(args: EngineArgs, on_progress: Callable[[Progress], None] | None = None, given: Given | None = None) -> Engine:
    """Finds the model, decides, loads, allocates, and serves a first request.

    Sets the number of torch's threads in this process.

    Args:
        given: a model in place of the one that the arguments name.

    Raises:
        ConfigError: the arguments cannot work with this model on this machine.
    """
    timeline = _Timeline(on_progress)
    with timeline.phase("tokenizer"):
        frontend = load_frontend(args) if given is None else given.frontend
    files, tokenizer = frontend.files, frontend.tokenizer
    with timeline.phase("config"):
        device = environment.probe(args.device)
        if given is not None:
            device = dataclasses.replace(device, available_memory=given.least(device.available_memory))
        chosen = implementation.choose(args, files) if given is None else given.implementation
        files = dataclasses.replace(files, decisions=(*files.decisions, *chosen.decisions))
        config = resolve(args, files, chosen.spec, device)
        torch.set_num_threads(config.num_threads)
    kernels = select.begin_compiling(config.model.layers, config.attention_backends, config.device, config.dtype)
    with timeline.phase("weights") as phase:
        model, report = chosen.load(files, config, phase.bytes)
        phase.detail = f"{report.num_tensors:,} tensors, {report.nbytes_read:,} bytes read"
    if args.deterministic:
        make_invariant(model)
    profile = None
    if device.cuda:
        with timeline.phase("profile") as phase:
            profile = measure(model, config)
            room = profile.room if given is None else given.least(profile.room)
            config = resolve(args, files, _as_it_ran(config.model, report), device, kv_room=room)
            phase.detail = f"{room:,} bytes left for KV cache"
    if given is not None:
        given.check(config)
    with timeline.phase("cache"):
        runner = ModelRunner(model, config, tokenizer.token_bytes if tokenizer is not None else None)
        scheduler = Scheduler(config.scheduler, config.cache)
        core = EngineCore(
            scheduler, runner, OutputProcessor(scheduler, tokenizer), pipeline_depth=config.scheduler.pipeline_depth
        )
    # Before the graphs, which may have them within: captured without, they would be captured again.
    if kernels:
        with timeline.phase("FlashInfer") as phase:
            phase.detail = _await_kernels(kernels, args.wait_for_kernels)
    if config.graph_rows:
        with timeline.phase("CUDA graphs") as phase:
            count, most = runner.capture_graphs(args.graph_capture_seconds, phase.progress)
            phase.detail = f"{count} of {most} shapes of steps; the others are captured when they first come up"
    with timeline.phase("warm-up"):
        core.warm_up(_warm_up_requests(config))
    inputs = frontend.inputs(args, vocab_size=config.model.vocab_size, max_model_len=config.scheduler.max_model_len)
    weights = [MemoryLine(line.name, line.nbytes, line.detail) for line in report.memory]
    memory = ledger(weights, config, runner.memory(), profile)
    decisions = (*config.decisions, *report.decisions)
    config = dataclasses.replace(config, quantization=report.quantization, decisions=decisions)
    info = engine_info(files, config, device, timeline.phases, memory)
    return Engine(core, inputs, info, config, files, tokenizer, model)


def load_core(args: EngineArgs, on_progress: Callable[[Progress], None]) -> tuple[EngineCore, EngineInfo]:
    """What the engine's process needs of ``load_engine``."""
    engine = load_engine(args, on_progress)
    return engine.core, engine.info


def _as_it_ran(spec: AnySpec, report: LoadReport) -> AnySpec:
    """The model, with what is known of it since it has run."""
    if not isinstance(spec, ForeignSpec) or not report.waits:
        return spec
    return dataclasses.replace(spec, host_reads=(*spec.host_reads, *report.waits))


def _await_kernels(kernels: list[Compiling], wait: bool) -> str:
    """What came of kernels that are compiled in the background, once they are if ``wait``."""
    for kernel in kernels:
        kernel.join(None if wait else 0.0)
    pending = sum(kernel.pending for kernel in kernels)
    if pending:
        return f"{pending} of {len(kernels)} kernels are being compiled: headrace's own do their work until then"
    return "; ".join(dict.fromkeys(kernel.outcome for kernel in kernels))


def _warm_up_requests(config: EngineConfig) -> list[Request]:
    """A greedy and a random one, as long as the context allows."""
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
