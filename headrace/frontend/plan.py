"""The report of an engine that is not built: what it would be, and the memory that it would take."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.config import Decision, EngineArgs, EngineConfig
from headrace.errors import ConfigError, MemoryConfigError

if TYPE_CHECKING:
    from headrace.engine.info import EngineInfo
    from headrace.resolve import DeviceFacts
    from headrace.sources.files import ModelFiles

_TRIED = "each alone: other formats of weights and KV, up to 16 ranks, a shorter context"


def planned(args: EngineArgs, devices: str | None = None) -> tuple[EngineInfo, ConfigError | None]:
    """The report of an engine that was decided upon and not built, and why it does not fit into memory here, if so: the report
    is then that of a machine with more.

    Args:
        devices: the engine's GPUs, as ``machines.imagine`` takes them; None: this machine's.

    Raises:
        ConfigError: it could not be built, whatever the memory.
    """
    from headrace.sources.files import find_model

    start = time.perf_counter()
    files = find_model(args)  # Reports a model that cannot be read before torch is imported.
    from headrace.engine.info import StartupPhase
    from headrace.frontend.prepare import with_formats
    from headrace.models.implementation import choose
    from headrace.resolve import resolve
    from headrace.startup.environment import probe
    from headrace.startup.ledger import other_formats, planned_ledger
    from headrace.startup.machines import imagine
    from headrace.startup.report import engine_info
    from headrace.startup.text import load_text

    if devices is None:
        device = probe(args.device)
    else:
        device, count = imagine(devices)
        args = _on_gpus(args, count)
    chosen = choose(args, files)
    files = dataclasses.replace(files, decisions=(*files.decisions, *chosen.decisions))
    refusal = None
    try:
        config = resolve(args, files, chosen.spec, device)
    except MemoryConfigError as error:
        found = _what_fits(args, files, device)
        refusal = MemoryConfigError(f"{error.message}; what would fit: {' or '.join(found) or 'nothing tried'}", error.param)
        lines = Decision("memory", "does not fit", error.message), Decision("would fit", " or ".join(found) or "none", _TRIED)
        files = dataclasses.replace(files, decisions=(*lines, *files.decisions))
        config = _with_room(lambda room: resolve(args, files, chosen.spec, device, kv_room=room))
    phases = [StartupPhase("config", time.perf_counter() - start, "the weights were not loaded")]
    more = *_formats(files, config), *other_formats(config, device)
    config = dataclasses.replace(config, decisions=(*config.decisions, *more))
    info = engine_info(files, config, device, phases, planned_ledger(config, device))
    try:
        text = load_text(args)
        info = msgspec.structs.replace(info, decisions=[*info.decisions, *text.pooling.decisions])
        return with_formats(info, text.answers(args)), refusal
    except ConfigError as error:
        # The report is of the model, and says what it can without a tokenizer.
        if error.param != "tokenizer":
            raise
        return info, refusal


def _formats(files: ModelFiles, config: EngineConfig) -> tuple[Decision, ...]:
    """The number formats in which the matrices of a native model would be held, as loading reports them."""
    import torch

    from headrace.model_spec import ModelSpec
    from headrace.models import registry
    from headrace.weights.load import planned_formats

    if not isinstance(config.model, ModelSpec):
        return ()
    args, table = config.args, registry.name_table(config.model)
    try:
        return planned_formats(
            registry.build(config.model, config.dtype, "meta"),
            table,
            files,
            device=torch.device(config.device),
            quantization=config.quantization,
            quantize_head=args.quantize_head,
            ignore=args.quantization_ignore,
        )
    except ConfigError as error:  # Other weights may be meant: those of a trainer, or files that are not here yet.
        return (Decision("formats of matrices", "not known", error.message),)


def _what_fits(args: EngineArgs, files: ModelFiles, device: DeviceFacts) -> list[str]:
    """The options with each of which alone the engine would fit."""
    from headrace.models.implementation import choose
    from headrace.quant.registry import QUANTIZATIONS
    from headrace.resolve import resolve

    def fits(**options: Any) -> EngineConfig | None:
        changed = dataclasses.replace(args, **options)
        try:
            return resolve(changed, files, choose(changed, files).spec, device)
        except ConfigError:  # Or it is not an option for this model, or on this device.
            return None

    formats = [name for name, each in QUANTIZATIONS[device.device].items() if each.rounding]
    found = [f"--quantization {name}" for name in formats if fits(quantization=name)]
    if device.cuda:
        found += ["--kv-cache-dtype fp8_e4m3"] if fits(kv_cache_dtype="fp8_e4m3") else []
        ranks = (2**power for power in range(1, 5))
        more = next((n for n in ranks if n > args.tensor_parallel_size and fits(tensor_parallel_size=n)), None)
        found += [] if more is None else [f"--tensor-parallel-size {more} on as many GPUs"]
    shorter = fits(max_model_len="auto")
    return found if shorter is None else [*found, f"--max-model-len {shorter.scheduler.max_model_len}"]


def _on_gpus(args: EngineArgs, count: int) -> EngineArgs:
    """The arguments of an engine on ``count`` GPUs: tensor parallel over all of them, unless the arguments use them otherwise.

    Raises:
        ConfigError: the arguments want more GPUs, or none.
    """
    if args.device == "cpu":
        raise ConfigError("--devices names GPUs, and device is cpu", "--devices")
    wanted = args.tensor_parallel_size * args.data_parallel_size
    if wanted > count:
        raise ConfigError(
            f"--devices has {count} GPUs, and --tensor-parallel-size times --data-parallel-size is {wanted}", "--devices"
        )
    ranks = args.tensor_parallel_size if wanted > 1 else count
    return dataclasses.replace(args, device="cuda", tensor_parallel_size=ranks)


def _with_room(decide: Callable[[int], EngineConfig]) -> EngineConfig:
    """Decides with the least power of two of bytes beside the weights that is enough.

    Raises:
        ConfigError: none is.
    """
    for power in range(30, 60):
        with contextlib.suppress(MemoryConfigError):
            return decide(2**power)
    return decide(2**60)
