"""Configuration of a simulation: the calibration of an engine, replicas, traffic and failures, as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.choices import Policy, RoutingPolicy
from headrace.config import MAX_NUM_SEQS, CacheConfig, SchedulerConfig
from headrace.errors import ConfigError
from headrace.host.user_files import read_input
from headrace.model_spec import CacheGroup, StateGroup, StatePlane
from headrace.options import INT32_MAX
from headrace.routing import Capacity
from headrace.sim.step_time import StepTimeModel

FORMAT: Literal["headrace calibration 2"] = "headrace calibration 2"

MOST_REQUESTS = 10_000_000
MOST_TOKENS = 10_000_000
"""Largest length of one prompt, output or step."""
_MOST_WORK = 10**10
"""Tokens of all requests together."""
_MOST_BLOCKS = 2**24
"""KV blocks of all replicas together: the memory of the process that simulates them."""

Tokens = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Bytes = Annotated[int, Meta(ge=1, le=2**50)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
T = TypeVar("T")


class GroupShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cache group."""

    bytes_per_token: Bytes
    window: Tokens | None = None
    chunked: bool = False
    """The window does not slide, but begins at multiples of its length."""


class StateShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The states of a hybrid model."""

    bytes: Bytes
    """Bytes of one sequence's state."""
    snapshot_bytes: Annotated[int, Meta(ge=0, le=2**50)]
    grid: Tokens
    """Tokens between snapshots, a multiple of the block size."""


class EngineShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of an engine that decide its steps."""

    max_model_len: Annotated[int, Meta(ge=2, le=MOST_TOKENS)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)]
    max_num_batched_tokens: Tokens
    block_size: Annotated[int, Meta(ge=1, le=1024)]
    cache_bytes: Bytes
    groups: Annotated[list[GroupShape], Meta(min_length=1, max_length=64)]
    max_prefill_tokens_beside_decode: Tokens | None = None
    max_step_seconds: Annotated[float, Meta(gt=0.0, le=1e9)] | None = None
    pipeline_depth: Annotated[int, Meta(ge=1, le=8)] = 1
    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True
    states: StateShape | None = None
    """None: the model has no state layers."""

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_len=INT32_MAX,
            policy=self.policy,
            pipeline_depth=self.pipeline_depth,
            max_prefill_tokens_beside_decode=self.max_prefill_tokens_beside_decode,
            max_step_seconds=self.max_step_seconds,
        )

    def cache(self) -> CacheConfig:
        groups = tuple(
            CacheGroup(i, one.window, (i,), one.bytes_per_token, chunked=one.chunked) for i, one in enumerate(self.groups)
        )
        states = {} if self.states is None else _states(self.states)
        return CacheConfig(
            block_size=self.block_size,
            groups=groups,
            nbytes=self.cache_bytes,
            enable_prefix_caching=self.enable_prefix_caching,
            dtype="float32",
            **states,
        )

    def capacity(self) -> Capacity:
        num_blocks = self.cache().num_blocks[: len(self.groups)]
        grid = 0 if self.states is None else self.states.grid
        return Capacity.of(self.max_num_seqs, self.max_num_batched_tokens, self.block_size, num_blocks, grid)


def _states(shape: StateShape) -> dict[str, Any]:
    """The fields of a CacheConfig."""
    group = StateGroup(((StatePlane("state", (-(-shape.bytes // 4),), "float32"),),))
    return {"states": group, "state_snapshot_bytes": shape.snapshot_bytes, "state_grid": shape.grid}


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measured engine."""

    format: Literal["headrace calibration 2"] = FORMAT
    model: str = ""
    device: str = ""
    engine: EngineShape
    step_times: StepTimeModel
    errors: dict[str, dict[str, float]] = {}
    """Errors of the estimates of held-out steps, by kind of step."""


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-normal numbers of tokens: half are below ``median``; ``sigma`` 0: all are alike, 1: heavy-tailed."""

    median: Annotated[float, Meta(ge=1, le=MOST_TOKENS)]
    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.0
    max: Tokens = 1_000_000

    @property
    def mean(self) -> float:
        """About: of the distribution without its maximum, or the maximum."""
        return min(self.max, self.median * math.exp(self.sigma**2 / 2))


class Prefixes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts begin with one of ``groups`` texts of ``tokens`` tokens; the n-th is used n^-``skew`` times as often."""

    groups: Annotated[int, Meta(ge=1, le=1_000_000)]
    tokens: Tokens
    skew: Annotated[float, Meta(ge=0, le=100)] = 0.0


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that arrive at random times."""

    requests: Annotated[int, Meta(ge=1, le=MOST_REQUESTS)]
    rate: Annotated[float, Meta(ge=1e-6, le=1e9)]
    """Arrivals a second; the times between them are exponential."""
    input_tokens: Lengths
    """Prompt tokens behind the prefix."""
    output_tokens: Lengths
    prefixes: Prefixes | None = None
    sessions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Number of sessions, each used equally often; None: requests have none."""


class ReplicaFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica dies."""

    replica: Annotated[int, Meta(ge=0)]
    at: Seconds
    down_seconds: Seconds
    """Time until it takes requests again."""


class SimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One simulation."""

    calibration: str | Calibration
    """A file, relative to this one's folder, or its content."""
    engine: dict[str, Any] = {}
    """Fields of the calibration's ``engine`` with other values."""
    replicas: Annotated[int, Meta(ge=1, le=4096)] = 1
    routing: RoutingPolicy = "prefix"
    max_queue_len: Annotated[int, Meta(ge=1, le=INT32_MAX)] = 4096
    message_seconds: Annotated[float, Meta(ge=0, le=3600)] = 0.0005
    """Time of a message from the front to an engine, and back."""
    traffic: Traffic | None = None
    """None: a trace is given."""
    failures: list[ReplicaFailure] = []
    seed: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0

    @property
    def measured(self) -> Calibration:
        """The calibration's content. Raises: ConfigError: it is in a file that has not been read (``load`` reads it)."""
        if isinstance(self.calibration, str):
            raise ConfigError(f"the calibration {self.calibration} has not been read", "calibration")
        return self.calibration


def read(path: str | Path, kind: type[T], param: str) -> T:
    """Reads a JSON file.

    Raises:
        ConfigError: it cannot be read, or is something else; names the field.
    """
    data = read_input(Path(path), param)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}", param) from error


def load(path: str | Path) -> SimConfig:
    """Reads a configuration with its calibration.

    Raises:
        ConfigError: as ``read``; or a value fits no other.
    """
    config = read(path, SimConfig, "--config")
    calibration = config.calibration
    if isinstance(calibration, str):
        calibration = read(Path(path).parent / calibration, Calibration, "calibration")
    try:
        engine = msgspec.convert(msgspec.to_builtins(calibration.engine) | config.engine, EngineShape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"engine: {error}", "engine") from error
    for failure in config.failures:
        if failure.replica >= config.replicas:
            raise ConfigError(f"failures: there is no replica {failure.replica} of {config.replicas}", "failures")
    if engine.states is not None and engine.states.grid % engine.block_size:
        raise ConfigError(
            f"states.grid {engine.states.grid} is not a multiple of block_size {engine.block_size}", "states.grid"
        )
    blocks = config.replicas * sum(engine.cache().num_blocks)
    if blocks > _MOST_BLOCKS:
        raise ConfigError(
            f"cache_bytes: the replicas have {blocks:,} KV blocks together, and at most {_MOST_BLOCKS:,} are simulated",
            "cache_bytes",
        )
    if config.traffic is not None:
        _check_work(config.traffic, engine.max_model_len)
    calibration = msgspec.structs.replace(calibration, engine=engine)
    return msgspec.structs.replace(config, calibration=calibration, engine={})


def _check_work(traffic: Traffic, max_model_len: int) -> None:
    prefix = 0 if traffic.prefixes is None else traffic.prefixes.tokens
    each = min(max_model_len, prefix + traffic.input_tokens.mean + traffic.output_tokens.mean)
    if traffic.requests * each > _MOST_WORK:
        raise ConfigError(
            f"traffic: {traffic.requests:,} requests of about {each:,.0f} tokens are too many: together they may have at most "
            f"{_MOST_WORK:,} tokens",
            "traffic",
        )
