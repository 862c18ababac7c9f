"""Builds an engine from its arguments, and keeps account: how long each phase took, where the memory goes, what was chosen."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from headrace.attention import select
from headrace.config import EngineArgs, EngineConfig
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine import environment
from headrace.engine.core import EngineCore
from headrace.engine.frontend import load_frontend
from headrace.engine.info import DecisionLine, EngineInfo, LayerLine, MemoryLine, Progress, StartupPhase
from headrace.engine.inputs import InputProcessor
from headrace.engine.outputs import OutputProcessor
from headrace.models import registry
from headrace.resolve import DeviceFacts, resolve
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import SamplingParams
from headrace.sources.files import ModelFiles
from headrace.spec import layer_kv
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
        self.details: dict[str, str] = {}
        self._tell = on_progress or (lambda progress: None)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Callable[[float, str], None]]:
        """Yields what to call with the part that is done, 0 to 1, and a detail."""
        start = time.perf_counter()
        self._tell(Progress(name))
        yield lambda fraction, detail: self._tell(Progress(name, fraction, detail))
        self.phases.append(StartupPhase(name, time.perf_counter() - start, self.details.get(name, "")))


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
        runner = ModelRunner(model, config, tokenizer.token_bytes if tokenizer is not None else None)
        scheduler = Scheduler(config.scheduler, config.cache)
        core = EngineCore(scheduler, runner, OutputProcessor(scheduler, tokenizer), pipeline_depth=args.pipeline_depth)
    with timeline.phase("warm-up"):
        core.warm_up(_warm_up_requests(config))
    inputs = frontend.inputs(args, vocab_size=config.model.vocab_size, max_model_len=config.scheduler.max_model_len)
    memory = [*report.memory, *_cache_lines(config)]
    info = describe(files, config, device, timeline.phases, memory)
    return Engine(core, inputs, info, config, files, tokenizer)


def load_core(args: EngineArgs, on_progress: Callable[[Progress], None]) -> tuple[EngineCore, EngineInfo]:
    """What the engine's process needs of ``load_engine``."""
    engine = load_engine(args, on_progress)
    return engine.core, engine.info


def describe(
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
        _, reason = select.choose(spec, config.device, config.dtype, config.args.attention_backend)
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
            )
        )
    return lines


def _cache_lines(config: EngineConfig) -> list[MemoryLine]:
    """The KV cache, a line a group."""
    cache = config.cache
    lines = []
    for group, count in zip(cache.groups, cache.num_blocks, strict=True):
        name = "KV cache" if len(cache.groups) == 1 else f"KV cache, {group.name}"
        detail = f"{count - 1} blocks of {cache.block_size} tokens and the null block, {cache.dtype}"
        lines.append(MemoryLine(name, count * cache.block_size * group.bytes_per_token, detail))
    return lines


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
