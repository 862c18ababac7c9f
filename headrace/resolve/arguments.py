"""Notes on arguments without effect on this device, and on the backend of structured output."""

from __future__ import annotations

import dataclasses
from importlib import metadata

from headrace.config import EngineArgs
from headrace.model_spec import AnySpec, ModelSpec, MoeSpec
from headrace.resolve.facts import DecisionLog

_FOR_GPUS = {
    "enforce_eager": "a CPU has no CUDA graphs: every kernel is launched by itself as it is",
    "wait_for_kernels": "FlashInfer's kernels, which are compiled in the background, are a GPU's",
    "graph_capture_seconds": "a CPU has no CUDA graphs to capture",
    "disable_custom_all_reduce": "on a CPU ranks communicate through gloo",
    "gpu_memory_utilization": "it is a share of a GPU's memory: on a CPU kv_cache_memory says how much the cache takes",
}
"""Arguments that are of no effect on a CPU, and why. Scripts that serve on both kinds of machines may give them."""


def note_gpu_arguments(args: EngineArgs, log: DecisionLog) -> None:
    for field in dataclasses.fields(args):
        if (why := _FOR_GPUS.get(field.name)) and (value := getattr(args, field.name)) != field.default:
            log.note(field.name, "no effect", f"{value} was asked for, but {why}")


def note_expert_parallel(args: EngineArgs, model: AnySpec, log: DecisionLog) -> None:
    if not args.enable_expert_parallel:
        return
    if args.tensor_parallel_size == 1:
        log.note("enable_expert_parallel", "no effect", "there is one rank, which holds all experts")
    elif not isinstance(model, ModelSpec) or not any(isinstance(mlp, MoeSpec) for mlp in model.mlps):
        log.note("enable_expert_parallel", "no effect", "the model has no experts")


def note_grammar_backend(args: EngineArgs, log: DecisionLog) -> None:
    """Names the library that holds structured output; it is loaded when a request first needs it."""
    if args.skip_tokenizer_init:
        log.note("structured output", "none", "there is no tokenizer (skip_tokenizer_init)")
    else:
        log.note("structured output", f"llguidance {metadata.version('llguidance')}", "the one backend there is")
