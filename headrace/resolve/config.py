"""``resolve``: decides everything that an engine is built from."""

from __future__ import annotations

import dataclasses
from importlib import metadata

from headrace.config import EngineArgs, EngineConfig, SchedulerConfig, SparseConfig
from headrace.errors import ConfigError, listed
from headrace.model_spec import AnySpec, ModelSpec, MoeSpec
from headrace.quant.registry import meaning
from headrace.resolve import schedule
from headrace.resolve.facts import DecisionLog, DeviceFacts
from headrace.resolve.memory import KVPlan, check_slots, estimated_room
from headrace.resolve.model import (
    check_head,
    compute_dtype,
    gguf_types,
    kv_dtype,
    note_stored_format,
    quantization,
    recorded_experts,
    stored_format,
    with_rope_factors,
)
from headrace.resolve.sparse import sparse, with_yarn_factor
from headrace.resolve.states import batched_tokens, note_sizes, state_group
from headrace.sources.files import ModelFiles

_FOR_GPUS = {
    "enforce_eager": "a CPU has no CUDA graphs: every kernel is launched by itself as it is",
    "wait_for_kernels": "FlashInfer's kernels, which are compiled in the background, are a GPU's",
    "graph_capture_seconds": "a CPU has no CUDA graphs to capture",
    "disable_custom_all_reduce": "on a CPU ranks communicate through gloo",
    "gpu_memory_utilization": "it is a share of a GPU's memory: on a CPU kv_cache_memory says how much the cache takes",
}
"""Arguments that are of no effect on a CPU, and why. Scripts that serve on both kinds of machines may give them."""


def resolve(
    args: EngineArgs, files: ModelFiles, model: AnySpec, device: DeviceFacts, *, kv_room: int | None = None
) -> EngineConfig:
    """Decides everything that the engine is built from.

    Args:
        kv_room: bytes that the KV cache may take at most, measured with the weights in place; None: estimated.

    Raises:
        ConfigError: the arguments contradict each other, the model or the machine. Names the parameter, and says what
            would work where there is a way.
    """
    if args.num_kv_blocks is not None and args.kv_cache_memory is not None:
        raise ConfigError("give num_kv_blocks or kv_cache_memory, not both: each says how large the cache is", "num_kv_blocks")
    check_patched_layers(args, model)
    log = DecisionLog(files.decisions)
    ranks = args.tensor_parallel_size
    if not device.cuda:
        # Ranks on GPUs have separate memory.
        device = dataclasses.replace(device, available_memory=device.available_memory // ranks)
    if not device.cuda:
        note_gpu_arguments(args, log)
    note_expert_parallel(args, model, log)
    model = with_yarn_factor(args, with_rope_factors(args, model, log), log)
    types = gguf_types(files)
    stored = stored_format(files)
    asked = meaning(args.quantization, stored, types is not None, device.device)
    dtype = compute_dtype(args, asked, model, types, device, log)
    packed = quantization(args, asked, model, types, stored, dtype, device, log)
    check_head(args, model, dtype, packed, device, log)
    note_stored_format(stored, dtype, packed, device, log)
    num_seqs, num_batched = schedule.batch(args, device, log)
    states = state_group(args, model, dtype, device, log)
    if states is not None:
        num_batched = batched_tokens(args, num_seqs, num_batched, log)
    cache_dtype = kv_dtype(args, model, stored, dtype, device, log)
    backends = schedule.attention(args, model, device, dtype, cache_dtype, log)
    room = estimated_room(args, model, dtype, packed, device) if kv_room is None else kv_room
    plan = KVPlan(args, model, cache_dtype, num_seqs, num_batched, room, device.cuda, states)
    cache, max_model_len = plan.choose(log)
    note_sizes(cache, num_seqs, log)
    prompts = sparse(args, model, device.device, dtype, cache_dtype, num_batched, max_model_len, log)
    check_slots(args, num_seqs, max_model_len, len(cache.groups), room)
    check_adapters(args, model, prompts)
    depth = schedule.pipeline_depth(args, device, log)
    num_threads = max(1, (args.num_threads or device.num_cores) // ranks)
    if args.num_threads is None or ranks > 1:
        cores = "the physical cores that this process may use" if args.num_threads is None else f"{args.num_threads} threads"
        log.note("num_threads", num_threads, cores if ranks == 1 else f"the share of a rank in {cores}")
    note_grammar_backend(args, log)
    return EngineConfig(
        args=args,
        model=model,
        cache=cache,
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_batched,
            max_queue_len=args.max_queue_len,
            policy=args.policy,
            pipeline_depth=depth,
            max_num_encoder_tokens=schedule.encoder_tokens(args, model, max_model_len, num_batched),
            max_prefill_tokens_beside_decode=schedule.prefill_beside_decode(
                args, device, num_threads, 1 if prompts is None else prompts.block, log
            ),
            max_step_seconds=schedule.step_seconds(args, device, log),
            sparse=prompts,
            max_loras=args.max_loras if args.enable_lora else 0,
        ),
        device=device.device,
        dtype=dtype,
        quantization=packed,
        attention_backends=backends,
        num_threads=num_threads,
        graph_rows=(rows := schedule.graph_rows(args, model, num_seqs, device, log)),
        graph_prompt_tokens=schedule.graph_prompt_tokens(model, num_batched) if rows else (),
        experts=recorded_experts(args, model, prompts is not None),
        decisions=tuple(log.entries),
    )


def check_patched_layers(args: EngineArgs, model: AnySpec) -> None:
    """Raises ConfigError unless ``layers_to_patch`` names every layer of a foreign model."""
    if args.layers_to_patch is None:
        return
    given, layers = set(args.layers_to_patch), {layer.layer for layer in model.layers}
    if isinstance(model, ModelSpec):
        why = f"layers_to_patch is for models of other libraries: {model.architecture} is native, with headrace's own attention"
    elif beyond := sorted(given - layers):
        why = f"layers_to_patch names {listed([*map(str, beyond)])}, and the model has the layers 0 to {len(layers) - 1}"
    elif left := sorted(layers - given):
        why = (
            f"layers_to_patch leaves out {listed([*map(str, left)])}: a layer that keeps its own attention has no paged KV "
            "cache, so chunks, batches and cached prefixes would be computed wrongly. Name all layers, or leave the option out"
        )
    else:
        return
    raise ConfigError(why, "layers_to_patch")


def check_adapters(args: EngineArgs, model: AnySpec, sparse: SparseConfig | None) -> None:
    """Raises ConfigError if the model cannot have adapters."""
    if not args.enable_lora:
        return
    if not isinstance(model, ModelSpec):
        raise ConfigError("enable_lora is for native models: those of other libraries have modules of their own", "enable_lora")
    if sparse is not None and sparse.routed:
        raise ConfigError(
            "enable_lora is for models without routers of their heads (--sparse-prefill off turns them off)", "enable_lora"
        )


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
