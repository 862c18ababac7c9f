"""From what the user asked, what the model is and what the device has, to a configuration, with the reason of each choice."""

from __future__ import annotations

import dataclasses
import typing
from collections import Counter
from collections.abc import Iterator, Sequence

from headrace.attention import select
from headrace.cache.fp8 import check_alignment
from headrace.config import (
    CacheConfig,
    Decision,
    Device,
    DType,
    EngineArgs,
    EngineConfig,
    KVCacheDType,
    Policy,
    Quantization,
    SamplingLimits,
    SchedulerConfig,
)
from headrace.errors import ConfigError
from headrace.kernels import support
from headrace.models.size import weight_bytes
from headrace.quant import int4, int8, native
from headrace.sampling_params import MAX_SEED
from headrace.sources.files import ModelFiles
from headrace.sources.gguf import open_gguf
from headrace.spec import AnySpec, Arena, CacheGroup, ForeignSpec, ModelSpec, MoeSpec, RopeSpec, block_sizes, cache_groups
from headrace.spec.kv import FP8_KV

CPU_NUM_SEQS = 64
CPU_BATCHED_TOKENS = 2048
CUDA_NUM_SEQS = 256
CUDA_BATCHED_TOKENS = 16384
CUDA_PIPELINE_DEPTH = 2
CUDA_SLACK = 2 << 30
"""Bytes of a GPU kept for what no profile shows: CUDA graphs, workspaces of libraries, fragments."""
MAX_GRAPH_ROWS = 512
GRAPH_PROMPT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
GRAPH_WORTH = 8e12
"""Operations of a step beyond which a GPU is busy for longer than the host takes to launch the kernels one by one."""
KV_SHARE = 0.25
"""Of the memory that is free beside the weights, what the KV cache takes at most unless told otherwise."""
KV_MODEST = 2 * 2**30
"""Bytes of KV cache that are taken without being asked for: filling them with zeros takes about a second."""
KV_SHARE_MOST = 0.8
"""What it may take where less would not hold a single sequence."""
MAX_BLOCK_SIZE = 1024
MAX_PIPELINE_DEPTH = 8
_PLAIN_TYPES = frozenset({"F32", "F16", "BF16"})
_INT4_TYPES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""GGUF types whose integers PyTorch's packed int4 kernel holds: groups of 32, each with a scale and a minimum."""
_INT8_TYPES = frozenset({"Q5_0", "Q5_1", "Q5_K", "Q8_0"})
"""Likewise the compiled kernels, beside those; PyTorch's int8 kernel has one scale a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What the machine has, as far as this process may use it."""

    device: str
    name: str
    instructions: frozenset[str]
    """CPU features, as the operating system names them."""
    num_cores: int
    """Physical cores, after affinity and control group limits."""
    available_memory: int
    """Bytes."""
    native_kernels: str = ""
    """The instructions that the compiled kernels use; empty: there are none here, PyTorch's own run."""
    total_memory: int = 0
    """Bytes that a GPU has in all."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def native_bfloat16(self) -> bool:
        return self.cuda or bool(self.instructions & {"avx512_bf16", "amx_bf16", "bf16"})


class _Book:
    """The decisions, as they are made."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._decisions = list(decisions)

    def note(self, name: str, value: object, reason: str) -> None:
        self._decisions.append(Decision(name, str(value), reason))

    def close(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)


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
    _check_arguments(args)
    book = _Book(files.decisions)
    if not device.cuda:
        _note_gpu_arguments(args, book)
    model = _with_rope_factors(args, model, book)
    types = _gguf_types(files)
    dtype = _dtype(args, model, types, device, book)
    quantization = _quantization(args, model, types, dtype, device, book)
    num_seqs, num_batched = _batch(args, device, book)
    kv_dtype = _kv_dtype(args, model, dtype, device)
    backends = _attention(args, model, device, dtype, kv_dtype, book)
    room = _kv_room(args, model, dtype, quantization, device) if kv_room is None else kv_room
    cache, max_model_len = _KVPlan(args, model, kv_dtype, num_seqs, num_batched, room, device.cuda).choose(book)
    depth = _pipeline_depth(args, device, book)
    num_threads = args.num_threads or device.num_cores
    if args.num_threads is None:
        book.note("num_threads", num_threads, "the physical cores that this process may use")
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
        ),
        limits=SamplingLimits.of(args),
        device=device.device,
        dtype=dtype,
        quantization=quantization,
        attention_backends=backends,
        num_threads=num_threads,
        graph_rows=(graph_rows := _graph_rows(args, model, num_seqs, device, book)),
        graph_prompt_tokens=_graph_prompt_tokens(model, num_batched) if graph_rows else (),
        decisions=book.close(),
    )


def _with_rope_factors(args: EngineArgs, model: AnySpec, book: _Book) -> AnySpec:
    """The model with longrope's factors for the longest context there may be: one choice for all sequences."""
    ropes = [layer.rope for layer in model.layers if layer.rope is not None and layer.rope.kind == "longrope"]
    if not ropes:
        return model
    border = min(int(rope.parameters["original_max_position_embeddings"]) for rope in ropes)
    if not isinstance(args.max_model_len, int) or args.max_model_len <= border:
        why = f"longrope has other factors beyond {border} tokens: set max_model_len above it for those, in every sequence"
        book.note("rotary embedding", "longrope, short factors", why)
        return model
    why = f"max_model_len is beyond {border}, up to which longrope has other factors: every sequence gets the long ones"
    book.note("rotary embedding", "longrope, long factors", why)
    long: dict[RopeSpec | None, RopeSpec] = {rope: dataclasses.replace(rope, long_factors=True) for rope in ropes}
    layers = tuple(dataclasses.replace(each, rope=long.get(each.rope, each.rope)) for each in model.layers)
    longest = min(int(rope.parameters["max_position_embeddings"]) for rope in ropes)
    return dataclasses.replace(model, layers=layers, max_position=longest)


def _matrices(model: ModelSpec) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of every matrix of the layers."""
    for spec, mlp in zip(model.layers, model.mlps, strict=True):
        yield from spec.matrices(model.hidden_size)
        yield from mlp.matrices(model.hidden_size)


# Arguments on their own


def _check_arguments(args: EngineArgs) -> None:
    """Values that no model and no machine could make sense of."""
    kinds = {"dtype": DType, "quantization": Quantization, "policy": Policy, "device": Device, "kv_cache_dtype": KVCacheDType}
    for name, kind in kinds.items():
        allowed = typing.get_args(kind)
        if getattr(args, name) not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(args, name)!r}", name)
    _check_integer(args, "block_size", 1, MAX_BLOCK_SIZE)
    if args.pipeline_depth is not None:
        _check_integer(args, "pipeline_depth", 1, MAX_PIPELINE_DEPTH)
    _check_integer(args, "seed", 0, MAX_SEED)
    _check_integer(args, "max_logprobs", -1)
    for name in ("max_queue_len", "max_bad_words_num", "bad_words_max_len", "max_stop_seqs_num", "stop_seqs_max_len"):
        _check_integer(args, name, 0 if name.endswith("num") else 1)
    for name in ("num_kv_blocks", "kv_cache_memory", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        if getattr(args, name) is not None:
            _check_integer(args, name, 1)
    if args.max_model_len not in (None, "auto"):
        _check_integer(args, "max_model_len", 2)
    if not isinstance(args.step_timeout, (int, float)) or not args.step_timeout > 0:
        raise ConfigError(f"step_timeout must be a number of seconds above 0, not {args.step_timeout!r}", "step_timeout")
    for name, low, high in (("gpu_memory_utilization", 0.0, 1.0), ("graph_capture_seconds", 0.0, 3600.0)):
        _check_number(args, name, low, high)
    if args.num_kv_blocks is not None and args.kv_cache_memory is not None:
        raise ConfigError("give num_kv_blocks or kv_cache_memory, not both: each says how large the cache is", "num_kv_blocks")


_FOR_GPUS = {
    "enforce_eager": "a CPU has no CUDA graphs: every kernel is launched by itself as it is",
    "wait_for_kernels": "FlashInfer's kernels, which are compiled in the background, are a GPU's",
    "graph_capture_seconds": "a CPU has no CUDA graphs to capture",
    "gpu_memory_utilization": "it is a share of a GPU's memory: on a CPU kv_cache_memory says how much the cache takes",
}
"""Arguments that are of no effect on a CPU, and why. Scripts that serve on both kinds of machines may give them."""


def _note_gpu_arguments(args: EngineArgs, book: _Book) -> None:
    for field in dataclasses.fields(args):
        if (why := _FOR_GPUS.get(field.name)) and (value := getattr(args, field.name)) != field.default:
            book.note(field.name, "no effect", f"{value} was asked for, but {why}")


def _check_number(args: EngineArgs, name: str, low: float, high: float) -> None:
    value = getattr(args, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}", name)


def _check_integer(args: EngineArgs, name: str, low: int, high: int | None = None) -> None:
    value = getattr(args, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise ConfigError(f"{name} must be an integer of at least {low}{upper}, not {value!r}", name)


# Numbers


def _gguf_types(files: ModelFiles) -> Counter[str] | None:
    """How many matrices of the layers the file has of each type; None: it is no GGUF file, or is not read."""
    if files.kind != "gguf":
        return None
    counts: Counter[str] = Counter()
    for path in files.weight_files:
        tensors = open_gguf(path).tensors
        counts.update(
            tensor.tensor_type.name for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) == 2
        )
    return counts


def _dtype(args: EngineArgs, model: AnySpec, types: Counter[str] | None, device: DeviceFacts, book: _Book) -> str:
    if args.dtype != "auto":
        return args.dtype
    quantised = types is not None and not types.keys() <= _PLAIN_TYPES
    if args.quantization in ("int8", "int4"):
        book.note("dtype", "bfloat16", f"the packed {args.quantization} kernels are fastest in bfloat16")
        return "bfloat16"
    source = "quantised" if quantised else model.dtype
    if device.cuda:
        dtype = source if source in ("bfloat16", "float16") else "bfloat16"
        book.note("dtype", dtype, f"the checkpoint is {source}, and a GPU's matrix units compute in 16 bits")
        return dtype
    if not device.native_bfloat16:
        book.note("dtype", "float32", "this CPU has no bfloat16 instructions (avx512_bf16, amx_bf16)")
        return "float32"
    if source not in ("quantised", "bfloat16"):
        book.note("dtype", "float32", f"the checkpoint is {source}, which bfloat16 would round")
        return "float32"
    book.note("dtype", "bfloat16", f"the checkpoint is {source}, and this CPU has bfloat16 instructions")
    return "bfloat16"


def _quantization(
    args: EngineArgs, model: AnySpec, types: Counter[str] | None, dtype: str, device: DeviceFacts, book: _Book
) -> str:
    asked = args.quantization
    if asked == "none":
        return asked
    if isinstance(model, ForeignSpec):
        if asked != "auto":
            raise ConfigError(f"quantization {asked} is for native models: leave it at auto or none", "quantization")
        book.note("quantization", "none", "another library built the model: its weights stay as they are")
        return "none"
    if device.cuda:
        if asked != "auto":
            raise ConfigError(f"quantization {asked} is for CPUs: the packed kernels do not run on a GPU", "quantization")
        book.note("quantization", "none", f"the packed kernels are the CPU's: weights are made {dtype}")
        return "none"
    if any(isinstance(mlp, MoeSpec) for mlp in model.mlps):
        if asked != "auto":
            raise ConfigError(
                f"quantization {asked} does not pack the experts of a mixture: set quantization none", "quantization"
            )
        book.note("quantization", "none", "the experts of a mixture are not packed")
        return "none"
    compiled = device.native_kernels not in ("", "portable")
    kernel = native.misfit if compiled else int8.misfit if asked == "int8" else int4.misfit
    misfits = [why for outputs, inputs in _matrices(model) if (why := kernel(inputs, outputs))]
    if asked in ("int8", "int4"):
        if dtype != "bfloat16" and not compiled:
            raise ConfigError(
                f"{asked} with dtype {dtype} needs the native kernels, which are not available here, and PyTorch's packed "
                f"{asked} kernel is made for bfloat16: leave dtype at auto or bfloat16, or set quantization none",
                "quantization",
            )
        if misfits:
            raise ConfigError(f"no packed {asked} kernel fits this model: a matrix has {misfits[0]}", "quantization")
        return asked
    held = _INT4_TYPES | _INT8_TYPES if compiled else _INT4_TYPES
    if types is None:
        book.note("quantization", "none", "the checkpoint is not a quantised GGUF file")
    elif dtype != "bfloat16" and args.dtype != "auto":
        book.note("quantization", "none", f"the weights are made {dtype}, for exact results")
    elif dtype != "bfloat16" and not compiled:
        book.note("quantization", "none", f"PyTorch's packed kernels are made for bfloat16, and this CPU computes in {dtype}")
    elif others := sorted(types.keys() - held):
        book.note("quantization", "none", f"no packed kernel here holds {', '.join(others)} as it is")
    elif misfits:
        book.note("quantization", "none", f"no packed kernel fits this model: a matrix has {misfits[0]}")
    else:
        bits = "int4" if types.keys() & _INT4_TYPES else "int8"
        whose = f"compiled {device.native_kernels}" if compiled else "PyTorch's"
        book.note("quantization", bits, f"{whose} kernels hold {', '.join(sorted(types))} as it is")
        return bits
    return "none"


def _batch(args: EngineArgs, device: DeviceFacts, book: _Book) -> tuple[int, int]:
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
        book.note("max_num_seqs", seqs, gain if seqs == most else "as many as tokens a step")
    if tokens is None:
        tokens = max(chunk, seqs)
        book.note("max_num_batched_tokens", tokens, "long chunks fill the matrix units; running requests wait for one at most")
    return seqs, tokens


def _kv_dtype(args: EngineArgs, model: AnySpec, dtype: str, device: DeviceFacts) -> str:
    """That of the KV cache.

    Raises:
        ConfigError: the device or a layer cannot do with the one that was asked for.
    """
    if args.kv_cache_dtype == "auto":
        return dtype
    if reasons := support.fp8_refusals(device.device):
        raise ConfigError("; ".join(reasons), "kv_cache_dtype")
    for spec in model.layers:
        check_alignment(spec, args.block_size)
    return FP8_KV


def _attention(
    args: EngineArgs, model: AnySpec, device: DeviceFacts, dtype: str, kv_dtype: str, book: _Book
) -> tuple[str, ...]:
    if args.deterministic and isinstance(model, ForeignSpec):
        raise ConfigError(
            f"deterministic is for native models: {model.architecture}'s own code decides in which order its products sum up",
            "deterministic",
        )
    requested = _invariant_attention(args, device) if args.deterministic else args.attention_backend
    choices = [select.choose(spec, device.device, dtype, requested, kv_dtype) for spec in model.layers]
    if args.deterministic:
        choices = [(backend, DETERMINISTIC) for backend, _ in choices]
    for (backend, reason), count in Counter(choices).items():
        layers = "every layer" if count == len(choices) else f"{count} of {len(choices)} layers"
        book.note("attention_backend", backend, f"{layers}: {reason}")
    return tuple(backend for backend, _ in choices)


DETERMINISTIC = "deterministic: it sums up in one order, whatever the batch"
"""Why a layer has the backend that it has then."""


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


def _pipeline_depth(args: EngineArgs, device: DeviceFacts, book: _Book) -> int:
    if args.pipeline_depth is not None:
        return args.pipeline_depth
    depth = CUDA_PIPELINE_DEPTH if device.cuda else 1
    why = "the host plans a step while the GPU runs the one before" if device.cuda else "host and device share their cores"
    book.note("pipeline_depth", depth, why)
    return depth


def _graph_rows(args: EngineArgs, model: AnySpec, num_seqs: int, device: DeviceFacts, book: _Book) -> tuple[int, ...]:
    if not device.cuda:
        return ()
    if args.enforce_eager:
        book.note("CUDA graphs", "none", "enforce_eager")
        return ()
    if isinstance(model, ForeignSpec) and model.host_reads:
        book.note("CUDA graphs", "none", f"the model waits for the GPU in every step, in {', '.join(model.host_reads[:3])}")
        return ()
    most = min(num_seqs, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MAX_GRAPH_ROWS + 1, 32)]
    rows = tuple(sorted({*(size for size in sizes if size < most), most}))
    book.note("CUDA graphs", f"{len(rows)} batch sizes", f"decode steps of up to {most} rows are launched as a whole")
    return rows


def _graph_prompt_tokens(model: AnySpec, num_batched: int) -> tuple[int, ...]:
    if isinstance(model, ForeignSpec):
        operations = 2 * model.num_weights
    else:
        operations = 2 * sum(outputs * inputs for outputs, inputs in _matrices(model))
    return tuple(size for size in GRAPH_PROMPT_TOKENS if size <= num_batched and size * operations <= GRAPH_WORTH)


# The KV cache


def _kv_room(args: EngineArgs, model: AnySpec, dtype: str, quantization: str, device: DeviceFacts) -> int:
    """Bytes left for KV beside the weights, before these are there."""
    room = device.available_memory - weight_bytes(model, dtype, quantization)
    if device.cuda:
        room -= CUDA_SLACK + int((1 - args.gpu_memory_utilization) * device.total_memory)
    return room


class _KVPlan:
    """How long sequences may be and how many bytes the cache groups share."""

    def __init__(
        self, args: EngineArgs, model: AnySpec, kv_dtype: str, num_seqs: int, num_batched: int, free: int, whole: bool
    ) -> None:
        """``whole``: all that is free is the cache's to take, as on a GPU that serves nothing else."""
        self._args = args
        self._model = model
        self._dtype = kv_dtype
        self._num_seqs = num_seqs
        self._num_batched = num_batched
        self._whole = whole
        self._free = max(0, free)
        """Bytes left beside the weights."""
        self._groups = cache_groups(model.layers, kv_dtype)
        self._sizes = block_sizes(self._groups, args.block_size)

    def choose(self, book: _Book) -> tuple[CacheConfig, int]:
        length = self._asked_length()
        if self._args.num_kv_blocks is not None:
            length, nbytes = self._from_blocks(length, self._args.num_kv_blocks, book)
        else:
            length, nbytes = self._from_memory(length, book)
        args = self._args
        cache = CacheConfig(
            block_size=args.block_size,
            groups=self._groups,
            nbytes=nbytes,
            enable_prefix_caching=args.enable_prefix_caching,
            dtype=self._dtype,
        )
        return cache, length

    def _asked_length(self) -> int | None:
        """None: as long as fits."""
        asked, most = self._args.max_model_len, self._model.max_position
        if asked == "auto":
            return None
        if asked is None:
            return most
        if asked > most:
            why = ""
            if any(layer.rope is not None and layer.rope.kind == "longrope" for layer in self._model.layers):
                why = ": beyond it, longrope turns tokens by other factors, and those in the cache would have to follow"
            raise ConfigError(
                f"max_model_len {asked} is longer than the model's context of {most} tokens{why}", "max_model_len"
            )
        return asked

    def _from_blocks(self, length: int | None, count: int, book: _Book) -> tuple[int, int]:
        """Room for ``count`` blocks of each group, and the null block. In bytes; groups may divide it otherwise."""
        nbytes = Arena.holding(self._sizes, [count] * len(self._sizes)).nbytes
        longest = self._longest(lambda candidate: self._least_bytes(candidate) <= nbytes)
        if length is None:
            length = self._auto_length(longest, f"{count} KV blocks", book)
        elif length > longest:
            least = sum(self._fewest(group, length) * size for group, size in zip(self._groups, self._sizes, strict=True))
            raise ConfigError(
                f"{count} KV blocks of {self._args.block_size} tokens do not hold one sequence of {length} tokens: set "
                f"num_kv_blocks to {-(-least // sum(self._sizes))} or more, or max_model_len to {longest} or less, or to auto",
                "num_kv_blocks",
            )
        return length, self._there_is(nbytes, "num_kv_blocks")

    def _there_is(self, nbytes: int, name: str) -> int:
        """The bytes that were asked for.

        Raises:
            ConfigError: there are not so many.
        """
        if nbytes > self._free:
            asked = getattr(self._args, name)
            raise ConfigError(f"{name} {asked:,} takes {nbytes:,} bytes, and {self._free:,} are there beside the weights", name)
        return nbytes

    def _from_memory(self, length: int | None, book: _Book) -> tuple[int, int]:
        given = self._args.kv_cache_memory
        share, most = min(int(self._free * KV_SHARE), KV_MODEST), int(self._free * KV_SHARE_MOST)
        if self._whole:
            share = most = self._free
        if length is None:
            budget = share if given is None else given
            longest = self._longest(lambda candidate: self._least_bytes(candidate) <= budget)
            length = self._auto_length(longest, f"{budget:,} bytes of KV cache", book)
        least = self._least_bytes(length)
        if least > (most if given is None else given):
            raise self._does_not_fit(length, least, most if given is None else given)
        if given is not None:
            return length, self._there_is(Arena(given, self._sizes).fitted(given).nbytes, "kv_cache_memory")
        useful = Arena.holding(self._sizes, [self._useful(group, length) for group in self._groups]).nbytes
        budget = share if self._whole else min(useful, max(share, least))
        if budget == useful:
            why = f"{self._num_seqs} sequences of {length} tokens could use no more"
        elif budget == least:
            why = f"one sequence of {length} tokens needs as much"
        elif self._whole:
            why = "all that is left of gpu_memory_utilization: more requests run at once, more prefixes are kept"
        elif share == KV_MODEST:
            why = "what is taken without being asked for; more lets more requests run at once and keeps more prefixes"
        else:
            why = f"{KV_SHARE:.0%} of the memory that is free beside the weights"
        nbytes = Arena(budget, self._sizes).fitted(budget).nbytes
        book.note("kv_cache_memory", f"{nbytes:,}", why)
        return length, nbytes

    def _does_not_fit(self, length: int, least: int, there: int) -> ConfigError:
        longest = self._longest(lambda candidate: self._least_bytes(candidate) <= there)
        shorter = f"max_model_len to {longest} or less, or to auto" if longest >= 2 else ""
        if self._args.kv_cache_memory is not None:
            message = (
                f"one sequence of {length} tokens needs {least:,} bytes of KV cache, and kv_cache_memory is {there:,}: set "
            )
            shorter = f", or {shorter}" if shorter else ""
            return ConfigError(f"{message}kv_cache_memory to {least:,} or more{shorter}", "kv_cache_memory")
        where = f" within gpu_memory_utilization {self._args.gpu_memory_utilization}" if self._whole else ""
        message = f"one sequence of {length} tokens needs {least:,} bytes of KV cache, and at most {there:,} are free{where}"
        return ConfigError(f"{message}: set {shorter}" if shorter else message, "max_model_len")

    def _auto_length(self, longest: int, where: str, book: _Book) -> int:
        if longest < 2:
            raise ConfigError(f"not even 2 tokens fit in {where}: give the cache more room", "max_model_len")
        whole = longest == self._model.max_position
        book.note("max_model_len", longest, "the model's context, all of it" if whole else f"the longest that fits in {where}")
        return longest

    def _longest(self, fits: typing.Callable[[int], bool]) -> int:
        """The largest length up to the model's context for which ``fits``, which is monotone; 0: none."""
        low, high = 0, self._model.max_position
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def _blocks(self, group: CacheGroup, length: int, chunk: int) -> int:
        """Blocks that one sequence holds at most: of a window group, those that a chunk's tokens still see."""
        size = self._args.block_size
        whole = -(-length // size)
        if group.window is None:
            return whole
        return min(whole, (group.window - 1 + chunk + size - 2) // size + 1)

    def _fewest(self, group: CacheGroup, length: int) -> int:
        """Without which one sequence of ``length`` cannot run at all, its prompt token by token."""
        return self._blocks(group, length, 1)

    def _useful(self, group: CacheGroup, length: int) -> int:
        """More than these could only serve the prefix cache."""
        return self._num_seqs * self._blocks(group, length, min(self._num_batched, length))

    def _least_bytes(self, length: int) -> int:
        return Arena.holding(self._sizes, [self._fewest(group, length) for group in self._groups]).nbytes
