"""Settings of steps: rows and tokens, steps in flight, attention backends, CUDA graphs."""

from __future__ import annotations

from collections import Counter

from headrace.attention import select
from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.kernels.attention.tiling import graph_size
from headrace.model_spec import AnySpec, ForeignSpec
from headrace.resolve.facts import DecisionLog, DeviceFacts, matrices

CPU_NUM_SEQS = 64
CPU_BATCHED_TOKENS = 2048
CPU_PREFILL_PER_THREAD = 32
CPU_STEP_SECONDS = 1.0
CUDA_NUM_SEQS = 256
CUDA_BATCHED_TOKENS = 16384
CUDA_PIPELINE_DEPTH = 2
MAX_GRAPH_ROWS = 2048
"""An 8B in FP8 takes the GPU some 20 ms with 500 rows, and the host some 30 ms to launch its kernels one by one."""
GRAPH_PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
GRAPH_WORTH = 8e12
"""Operations of a step beyond which a GPU is busy for longer than the host takes to launch the kernels one by one."""


def batch(args: EngineArgs, device: DeviceFacts, log: DecisionLog) -> tuple[int, int]:
    """Sequences at once, and tokens a step."""
    most, chunk = (CUDA_NUM_SEQS, CUDA_BATCHED_TOKENS) if device.cuda else (CPU_NUM_SEQS, CPU_BATCHED_TOKENS)
    seqs, tokens = args.max_num_seqs, args.max_num_batched_tokens
    if seqs is not None and tokens is not None and tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) is less than max_num_seqs ({seqs}): each running sequence needs a token a step",
            "max_num_batched_tokens",
        )
    if seqs is None:
        seqs = most if tokens is None else min(most, tokens)
        gain = "each token waits longer beyond it" if device.cuda else "larger batches gain little on a CPU"
        log.note("max_num_seqs", seqs, gain if seqs == most else "as many as tokens a step")
    if tokens is None:
        tokens = max(chunk, seqs)
        log.note("max_num_batched_tokens", tokens, "long chunks fill the matrix units; running requests wait for one at most")
    return seqs, tokens


def prefill_beside_decode(args: EngineArgs, device: DeviceFacts, num_threads: int, least: int, log: DecisionLog) -> int | None:
    """Prompt tokens of a step while sequences generate, ``least`` or more; None: no limit."""
    if args.max_prefill_tokens_beside_decode is not None or device.cuda:
        return args.max_prefill_tokens_beside_decode
    tokens = max(least, CPU_PREFILL_PER_THREAD * num_threads)
    log.note("max_prefill_tokens_beside_decode", tokens, "a prompt takes little longer in such chunks, and streams go on")
    return tokens


def step_seconds(args: EngineArgs, device: DeviceFacts, log: DecisionLog) -> float | None:
    """Seconds that a step with prompt tokens is to take; None: any time."""
    if args.max_step_seconds is not None:
        return args.max_step_seconds or None
    seconds = None if device.cuda else CPU_STEP_SECONDS
    why = "a GPU computes the largest step in less" if device.cuda else "chunks follow the speed of the machine"
    log.note("max_step_seconds", seconds or 0, why)
    return seconds


def attention(
    args: EngineArgs, model: AnySpec, device: DeviceFacts, dtype: str, kv_dtype: str, log: DecisionLog
) -> tuple[str, ...]:
    if args.deterministic and isinstance(model, ForeignSpec):
        raise ConfigError(
            f"deterministic is for native models: {model.architecture}'s own code decides in which order its products sum up",
            "deterministic",
        )
    requested = _invariant_attention(args, device) if args.deterministic else args.attention_backend
    modes = select.modes_of(model)
    choices = [select.choose(spec, device.device, dtype, kv_dtype, modes, requested) for spec in model.layers]
    if args.deterministic:
        choices = [choice._replace(why=DETERMINISTIC) for choice in choices]
    for choice, count in Counter(choices).items():
        layers = "every layer" if count == len(choices) else f"{count} of {len(choices)} layers"
        log.note("attention_backend", choice.name, f"{layers}: {choice.reason}")
    return tuple(choice.name for choice in choices)


DETERMINISTIC = "deterministic: it sums up in one order, whatever the batch"
"""Reason for the backend of a layer in deterministic mode."""


def _invariant_attention(args: EngineArgs, device: DeviceFacts) -> str:
    if not device.cuda:
        raise ConfigError("deterministic is for GPUs: the CPU's products sum up in an order of their own", "deterministic")
    if args.attention_backend not in ("auto", "invariant"):
        raise ConfigError(
            f"attention backend {args.attention_backend} sums up in an order that depends on the batch: leave it at auto, or "
            "set deterministic off",
            "deterministic",
        )
    return "invariant"


ENCODER_TOKENS = 16_384
"""Default of ``max_num_encoder_tokens`` where prompts may have more: the encoder's memory grows with it."""


def encoder_tokens(args: EngineArgs, model: AnySpec, max_model_len: int, num_batched: int) -> int:
    """Encoder work of a step: by default it may compute pictures alone. 0: there is no encoder."""
    if model.vision is None or model.vision.features_only or args.mm_encoder == "none":
        return 0
    return args.max_num_encoder_tokens or min(max(max_model_len, num_batched), ENCODER_TOKENS)


def pipeline_depth(args: EngineArgs, device: DeviceFacts, log: DecisionLog) -> int:
    if args.pipeline_depth is not None:
        return args.pipeline_depth
    depth = CUDA_PIPELINE_DEPTH if device.cuda else 1
    why = "the host plans a step while the GPU runs the one before" if device.cuda else "host and device share their cores"
    log.note("pipeline_depth", depth, why)
    return depth


def graph_rows(args: EngineArgs, model: AnySpec, num_seqs: int, device: DeviceFacts, log: DecisionLog) -> tuple[int, ...]:
    if not device.cuda:
        return ()
    if args.enforce_eager:
        log.note("CUDA graphs", "none", "enforce_eager")
        return ()
    if isinstance(model, ForeignSpec) and model.no_graphs:
        log.note("CUDA graphs", "none", model.no_graphs)
        return ()
    most = min(num_seqs, MAX_GRAPH_ROWS)
    rows = tuple(sorted({min(graph_size(count), most) for count in range(1, most + 1)}))
    states = ", state layers with the others" if model.states else ""
    log.note("CUDA graphs", f"{len(rows)} batch sizes", f"decode steps of up to {most} rows are launched as a whole{states}")
    return rows


def graph_prompt_tokens(model: AnySpec, num_batched: int) -> tuple[int, ...]:
    if isinstance(model, ForeignSpec):
        operations = 2 * model.num_weights
    else:
        operations = 2 * sum(outputs * inputs for outputs, inputs in matrices(model))
    return tuple(size for size in GRAPH_PROMPT_TOKENS if size <= num_batched and size * operations <= GRAPH_WORTH)
