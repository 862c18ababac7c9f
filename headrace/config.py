"""Arguments as a user gives them (EngineArgs) and the configuration they resolve to (EngineConfig). Both are frozen.

``headrace.resolve.resolve`` turns the first into the second, and says why.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from headrace.errors import ConfigError
from headrace.spec import AnySpec, Arena, CacheGroup, block_sizes

DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "auto", "int8", "int4"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
ModelImpl = Literal["auto", "native", "transformers", "megatron"]
KVCacheDType = Literal["auto", "fp8_e4m3"]
Policy = Literal["fcfs", "priority"]
Device = Literal["auto", "cpu", "cuda"]


def _limit(variable: str, default: int) -> int:
    """A limit's default: the environment's value where it is set.

    Raises:
        ConfigError: it is no whole number.
    """
    given = os.environ.get(variable, "").strip()
    if not given:
        return default
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"the environment's {variable} must be a whole number, not {given!r}", variable) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Everything a user may set about an engine. None means: let headrace choose, and say why."""

    model: str | None = None
    """A directory, a hub id, a .gguf file; None: the embedded default model."""
    revision: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    device: Device = "auto"
    """auto: the first CUDA device if there is one, else the CPU."""
    model_impl: ModelImpl = "auto"
    """Whose code the model is. auto: ours if there is an implementation of it, else transformers'; Megatron's for its own
    checkpoints."""
    trust_remote_code: bool = False
    """Run code that comes with a checkpoint."""
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    seed: int = 0
    """Seeds requests that bring no seed of their own, and dummy weights."""
    max_model_len: int | Literal["auto"] | None = None
    """None: the model's own context length. auto: the longest that fits in the KV cache."""
    kv_cache_dtype: KVCacheDType = "auto"
    """auto: as ``dtype``. fp8_e4m3: half of bfloat16's bytes and a scale for each token and head of K and of V."""
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    """Bytes for KV cache."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that the engine may take in all."""
    enable_prefix_caching: bool = True
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue_len: int = 4096
    policy: Policy = "fcfs"
    attention_backend: str = "auto"
    num_threads: int | None = None
    pipeline_depth: int | None = None
    """How many steps may be launched before the first one's results are read."""
    enforce_eager: bool = False
    """Launch every kernel of a step by itself: no CUDA graphs."""
    deterministic: bool = False
    """A request's tokens and logprobs are bitwise the same in any company and chunking, preempted or not, cached or not."""
    wait_for_kernels: bool = False
    """Begin to serve only when libraries' kernels that are compiled in the background are ready."""
    graph_capture_seconds: float = 20.0
    """How long a start-up may capture CUDA graphs; those that it did not come to are captured when first needed."""
    step_timeout: float = 120.0
    """Seconds without a finished step, while work is pending, after which the engine counts as stuck."""
    record_steps: str | None = None
    """File that receives the stream of plans, for replay."""
    max_logprobs: int = 20
    max_bad_words_num: int = dataclasses.field(default_factory=lambda: _limit("HEADRACE_MAX_BAD_WORDS_NUM", 16))
    bad_words_max_len: int = dataclasses.field(default_factory=lambda: _limit("HEADRACE_BAD_WORDS_MAX_LEN", 8))
    max_stop_seqs_num: int = dataclasses.field(default_factory=lambda: _limit("HEADRACE_MAX_STOP_SEQS_NUM", 16))
    stop_seqs_max_len: int = dataclasses.field(default_factory=lambda: _limit("HEADRACE_STOP_SEQS_MAX_LEN", 8))

    def __post_init__(self) -> None:
        """Raises ConfigError where a switch is anything but on or off: ``"no"`` would be on."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be True or False, not {value!r}", field.name)


@dataclasses.dataclass(frozen=True)
class Decision:
    """One thing headrace chose at start-up, and why."""

    name: str
    value: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """``nbytes`` are shared by all groups: ``arena`` says how. Block 0 of each group is the null block and holds no data."""

    block_size: int
    groups: tuple[CacheGroup, ...]
    nbytes: int
    enable_prefix_caching: bool
    dtype: str
    """Of the numbers in it: the model's, or fp8_e4m3."""

    @classmethod
    def holding(
        cls, counts: Sequence[int], *, block_size: int, groups: tuple[CacheGroup, ...], enable_prefix_caching: bool, dtype: str
    ) -> CacheConfig:
        """With as many bytes as it takes to hold ``counts[g]`` blocks of each group at once, and the null block."""
        nbytes = Arena.holding(block_sizes(groups, block_size), counts).nbytes
        return cls(
            block_size=block_size, groups=groups, nbytes=nbytes, enable_prefix_caching=enable_prefix_caching, dtype=dtype
        )

    @cached_property
    def arena(self) -> Arena:
        return Arena(self.nbytes, block_sizes(self.groups, self.block_size))

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Per group, what its block numbers stay below."""
        return self.arena.num_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_len: int
    policy: Policy
    pipeline_depth: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingLimits:
    """What one request may ask of sampling; more is refused with the parameter's name. Lengths are in tokens."""

    max_logprobs: int
    max_bad_words_num: int
    bad_words_max_len: int
    max_stop_seqs_num: int
    stop_seqs_max_len: int

    @classmethod
    def of(cls, args: EngineArgs) -> SamplingLimits:
        return cls(**{field.name: getattr(args, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything decided. Serialisable by pickle between our own processes; never received from outside."""

    args: EngineArgs
    model: AnySpec
    cache: CacheConfig
    scheduler: SchedulerConfig
    limits: SamplingLimits
    device: str
    dtype: str
    quantization: str
    """none, int8 or int4."""
    attention_backends: tuple[str, ...]
    """Name of the backend of each layer."""
    num_threads: int
    graph_rows: tuple[int, ...] = ()
    """Batch sizes of decode steps for which a CUDA graph may be captured, rising; empty: none."""
    graph_prompt_tokens: tuple[int, ...] = ()
    """Tokens of prompts, beside decode rows or without, for which one may be captured, rising; empty: none."""
    decisions: tuple[Decision, ...]
