"""Loads a model into this process: resolves its configuration, loads weights, measures memory, allocates the cache."""

from __future__ import annotations

import dataclasses

import torch

import headrace
from headrace.attention import select
from headrace.attention.compiled import Compiling
from headrace.config import Decision, EngineConfig, MemoryLine
from headrace.engine.executor import LocalExecutor
from headrace.engine.timeline import Timeline
from headrace.errors import ConfigError
from headrace.layers.linear import make_invariant
from headrace.models.decoder import Decoder
from headrace.parallel.agreement import Agreement
from headrace.resolve import resolve
from headrace.runner.runner import ModelRunner
from headrace.startup import environment
from headrace.startup.known import ask_compiler, dry_run, profiled
from headrace.startup.loaded import Loaded
from headrace.startup.source import ModelSource
from headrace.startup.text import ModelText
from headrace.startup.vision import encoder_calls, load_vision, with_vision


def load_executor(source: ModelSource, text: ModelText, timeline: Timeline) -> Loaded:
    """Loads the model into this process. Processes of ``source.ranks`` do so together.

    Raises:
        ConfigError: as ``load_engine``.
    """
    args, files = source.args, text.files
    with timeline.phase("config"):
        device = environment.share(environment.probe(args.device), args.data_parallel_size)
        device = dataclasses.replace(device, available_memory=source.ranks.least(device.available_memory))
        chosen = source.implementation(files)
        files = dataclasses.replace(files, decisions=(*files.decisions, *chosen.decisions))
        config = resolve(args, files, chosen.spec, device)
        torch.set_num_threads(config.num_threads)
    ask_compiler(device)
    kernels = select.begin_compiling(config.model.layers, config.attention_backends, config.device, config.dtype)
    with timeline.phase("weights") as phase:
        model, report = chosen.load(files, config, phase.bytes)
        phase.detail = f"{report.num_tensors:,} tensors, {report.nbytes_read:,} bytes read"
    encoder, why_encoder = load_vision(files, config, timeline)
    if args.deterministic:
        make_invariant(model)
    if args.head_dtype == "float32" and isinstance(model, Decoder):
        model.lm_head.exact = True
    profile, known = None, False
    if device.cuda:
        with timeline.phase("profile") as phase:
            profile, known = profiled(model, config, device, source.ranks, encoder_calls(files, config, encoder))
            room = source.ranks.least(profile.room)
            config = resolve(args, files, chosen.spec, device, kv_room=room)
            phase.detail = f"{room:,} bytes left for KV cache" + ", by the profile of an earlier start" * known
    config = with_vision(files, config, encoder, why_encoder)
    _check_alike(source.ranks, config)
    with timeline.phase("cache"):
        token_bytes = None if text.tokenizer is None else text.tokenizer.token_bytes
        runner = ModelRunner(model, config, token_bytes, encoder=encoder)
        own = None if files.kind == "object" else files
        executor = LocalExecutor(model, runner, source.ranks, own, weight_timeout=args.weight_timeout)
    # Before the graphs, which may have them within: captured without, they would be captured again.
    if kernels:
        with timeline.phase("FlashInfer") as phase:
            # Ranks capture the same graphs at the same time, so none may find a kernel ready before the others do.
            phase.detail = _await_kernels(kernels, args.wait_for_kernels or source.group.size > 1)
    if config.graph_rows and not known and (dry := dry_run(model, device, source.ranks.size)) is not None:
        with timeline.phase("kernels") as phase, dry:
            phase.detail = f"compiled ahead for {runner.run_first()} steps"
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


def _await_kernels(kernels: list[Compiling], wait: bool) -> str:
    """The state of kernels that compile in the background; ``wait``: after they are ready."""
    for kernel in kernels:
        kernel.join(None if wait else 0.0)
    pending = sum(kernel.pending for kernel in kernels)
    if pending:
        return f"{pending} of {len(kernels)} kernels come in the background: headrace's own do their work until then"
    return "; ".join(dict.fromkeys(kernel.outcome for kernel in kernels))
