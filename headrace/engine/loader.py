"""Builds an engine from its arguments, and keeps account: how long each phase took, where the memory goes, what was chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from headrace.config import EngineArgs, EngineConfig
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine import environment
from headrace.engine.core import EngineCore
from headrace.engine.frontend import load_frontend
from headrace.engine.info import EngineInfo, MemoryLine, Progress, StartupPhase
from headrace.engine.inputs import InputProcessor
from headrace.engine.outputs import OutputProcessor
from headrace.engine.report import cache_lines, engine_info
from headrace.models import registry
from headrace.resolve import resolve
from headrace.runner.build import build_runner
from headrace.sampling_params import SamplingParams
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import Tokenizer
from headrace.weights.load import load_weights

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


class _Timeline:
    """Times the phases of a start-up and tells of them."""

    def __init__(self, on_progress: Callable[[Progress], None] | None) -> None:
        self.phases: list[StartupPhase] = []
        self._tell = on_progress or (lambda progress: None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[float, str], None]]:
        """Yields what to call with the part that is done, 0 to 1, and a detail."""
        start = time.perf_counter()
        self._tell(Progress(name))
        yield lambda fraction, detail: self._tell(Progress(name, fraction, detail))
        self.phases.append(StartupPhase(name, time.perf_counter() - start))


def load_engine(args: EngineArgs, on_progress: Callable[[Progress], None] | None = None) -> Engine:
    """Finds the model, decides, loads, allocates, and serves a first request.

    Sets the number of torch's threads in this process.

    Raises:
        ConfigError: the arguments cannot work with this model on this machine.
    """
    timeline = _Timeline(on_progress)
    with timeline.phase("tokenizer"):
        frontend = load_frontend(args)
    files, tokenizer = frontend.files, frontend.tokenizer
    with timeline.phase("config"):
        device = environment.probe()
        config = resolve(args, files, registry.model_spec(files.config), device)
        torch.set_num_threads(config.num_threads)
    with timeline.phase("weights") as progress:
        model = registry.build(config.model, config.dtype, config.device)
        report = load_weights(model, files, config.dtype, config.quantization, args.seed, progress)
    with timeline.phase("cache"):
        runner = build_runner(model, config, tokenizer.token_bytes if tokenizer is not None else None)
        scheduler = Scheduler(config.scheduler, config.cache)
        core = EngineCore(scheduler, runner, OutputProcessor(scheduler, tokenizer), pipeline_depth=args.pipeline_depth)
    with timeline.phase("warm-up"):
        core.warm_up(_warm_up_requests(config))
    inputs = frontend.inputs(args, vocab_size=config.model.vocab_size, max_model_len=config.scheduler.max_model_len)
    rest = [MemoryLine(name, nbytes) for name, nbytes in runner.memory() if name != "KV cache"]
    memory = [*report.memory, *cache_lines(config), *rest]
    info = engine_info(files, config, device, timeline.phases, memory)
    return Engine(core, inputs, info, config, files, tokenizer)


def load_core(args: EngineArgs, on_progress: Callable[[Progress], None]) -> tuple[EngineCore, EngineInfo]:
    """What the engine's process needs of ``load_engine``."""
    engine = load_engine(args, on_progress)
    return engine.core, engine.info


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
