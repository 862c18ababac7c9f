"""What is simulated: the calibration of an engine, replicas, traffic and failures, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.config import CacheConfig, Policy, RoutingPolicy, SchedulerConfig
from headrace.core.routing import Capacity
from headrace.errors import ConfigError
from headrace.model_spec import CacheGroup
from headrace.options import INT32_MAX
from headrace.sim.step_time import StepTimeModel

FORMAT: Literal["headrace calibration 2"] = "headrace calibration 2"

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
T = TypeVar("T")


class GroupShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cache group."""

    bytes_per_token: Positive
    window: Positive | None = None


class EngineShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of an engine decides its steps."""

    max_model_len: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive
    block_size: Positive
    cache_bytes: Positive
    groups: Annotated[list[GroupShape], Meta(min_length=1)]
    max_prefill_tokens_beside_decode: Positive | None = None
    pipeline_depth: Annotated[int, Meta(ge=1, le=8)] = 1
    policy: Policy = "fcfs"
    enable_prefix_caching: bool = True

    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_queue_len=INT32_MAX,
            policy=self.policy,
            pipeline_depth=self.pipeline_depth,
            max_prefill_tokens_beside_decode=self.max_prefill_tokens_beside_decode,
        )

    def cache(self) -> CacheConfig:
        groups = tuple(CacheGroup(i, one.window, (i,), one.bytes_per_token) for i, one in enumerate(self.groups))
        return CacheConfig(
            block_size=self.block_size,
            groups=groups,
            nbytes=self.cache_bytes,
            enable_prefix_caching=self.enable_prefix_caching,
            dtype="float32",
        )

    def capacity(self) -> Capacity:
        return Capacity.of(self.max_num_seqs, self.max_num_batched_tokens, self.block_size, self.cache().num_blocks)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A measured engine."""

    format: Literal["headrace calibration 2"] = FORMAT
    model: str = ""
    device: str = ""
    engine: EngineShape
    step_times: StepTimeModel
    errors: dict[str, dict[str, float]] = {}
    """Of the held-out steps, by their kind."""


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-normal numbers of tokens: half are below ``median``; ``sigma`` 0: all are alike, 1: heavy-tailed."""

    median: Annotated[float, Meta(ge=1)]
    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.0
    max: Positive = 1_000_000


class Prefixes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts begin with one of ``groups`` texts of ``tokens`` tokens; the n-th is used n^-``skew`` times as often."""

    groups: Positive
    tokens: Positive
    skew: Annotated[float, Meta(ge=0)] = 0.0


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Requests that arrive at random times."""

    requests: Positive
    rate: Annotated[float, Meta(gt=0)]
    """Arrivals a second; the times between them are exponential."""
    input_tokens: Lengths
    """Behind the prefix."""
    output_tokens: Lengths
    prefixes: Prefixes | None = None
    sessions: Positive | None = None
    """Number of sessions, each used equally often; None: requests have none."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A replica dies."""

    replica: Annotated[int, Meta(ge=0)]
    at: Seconds
    down_seconds: Seconds
    """Until it takes requests again."""


class SimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One simulation."""

    calibration: str | Calibration
    """A file, relative to this one's folder, or its content."""
    engine: dict[str, Any] = {}
    """Fields of the calibration's ``engine`` with other values."""
    replicas: Annotated[int, Meta(ge=1, le=4096)] = 1
    routing: RoutingPolicy = "prefix"
    max_queue_len: Positive = 4096
    message_seconds: Seconds = 0.0005
    """From the front to an engine, and back."""
    traffic: Traffic | None = None
    """None: a trace is given."""
    failures: list[Failure] = []
    seed: Annotated[int, Meta(ge=0)] = 0

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
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param) from error
    except msgspec.DecodeError as error:
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
    calibration = msgspec.structs.replace(calibration, engine=engine)
    return msgspec.structs.replace(config, calibration=calibration, engine={})
