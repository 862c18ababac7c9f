"""Messages between the engine process and its client: msgspec tagged unions over a ``ChildProcess``'s channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from headrace.config import EngineArgs
from headrace.core.commands import WeightCommand
from headrace.core.request import Request
from headrace.core.weights import ServedWeights, WeightResult, WeightStatus
from headrace.engine.info import EngineInfo, Progress
from headrace.host.channel import Data
from headrace.host.tagged import Tagged
from headrace.metrics.stats import EngineStats
from headrace.outputs import OutputDelta
from headrace.routing import CacheReport
from headrace.sources.adapter import AdapterFiles

STATS_SECONDS = 0.5

ControlName = Literal["reset_prefix_cache", "check_integrity", "drain", "load_adapter", "drop_adapter"]


# To the engine


class Start(Tagged, frozen=True):
    """The first message: build the engine."""

    args: EngineArgs
    log_level: int
    origin: float
    """Time at which the start-up began, on ``host.clock``."""
    stacks: int
    """Descriptor of the file for stacks, which the engine's process has inherited."""
    replica: int = 0
    """Number of this engine among the ``args.data_parallel_size`` replicas."""
    weights: ServedWeights = ServedWeights()
    """The weights and the pause of the engine before this one."""


class AddRequest(Tagged, frozen=True):
    """Answered with Accepted or Rejected, before any of its deltas."""

    request: Request


class Abort(Tagged, frozen=True):
    request_ids: list[str]


class Control(Tagged, frozen=True):
    """Answered with ControlReply. ``drain`` is answered once no work is left."""

    call: int
    name: ControlName
    adapter: AdapterFiles | None = None
    """The adapter that is loaded or dropped."""


class WeightCall(Tagged, frozen=True):
    """A command to the engine's weights. Answered with WeightReply."""

    call: int
    command: WeightCommand


class Shutdown(Tagged, frozen=True):
    """Stop at once, without an answer."""


ToEngine = Start | AddRequest | Abort | Control | WeightCall | Shutdown


# From the engine


class Starting(Tagged, frozen=True):
    progress: Progress


class Ready(Tagged, frozen=True):
    """The engine has run a first step and takes requests."""

    info: EngineInfo
    stats: EngineStats


class Accepted(Tagged, frozen=True):
    request_id: str


class Rejected(Tagged, frozen=True):
    """The request was refused; the other fields rebuild the error."""

    request_id: str
    error: Literal["request", "queue_full", "engine", "unavailable"]
    message: str
    param: str | None


class StepDeltas(Tagged, frozen=True):
    """Sent after every step and after aborts, also without deltas: the watchdog counts them."""

    deltas: list[OutputDelta]


class Stats(Tagged, frozen=True):
    """Sent every ``STATS_SECONDS`` while steps run, and ahead of the first and the last StepDeltas between idle times."""

    stats: EngineStats


class CacheChanged(Tagged, frozen=True):
    """Sent ahead of the StepDeltas of the same step, to a router that looks at prefixes."""

    report: CacheReport


class ControlReply(Tagged, frozen=True):
    call: int
    value: bool = True
    error: str | None = None
    param: str | None = None
    """The parameter at fault, where the error is the caller's."""


class WeightsChanged(Tagged, frozen=True):
    """Sent at every change of the weights' state, and each second while a command to them is under way."""

    status: WeightStatus


class WeightReply(Tagged, frozen=True):
    call: int
    result: WeightResult


class Fatal(Tagged, frozen=True):
    """The last message of an engine that cannot go on."""

    kind: Literal["config", "resources", "killed", "engine"]
    """config: the arguments cannot work with this model on this machine. resources: a file, descriptors or memory were
    missing. killed: a rank was ended or stopped from outside, or stuck."""
    message: str
    param: str | None
    traceback: str
    """Traceback for the log; empty: the message says it all."""


FromEngine = (
    Starting
    | Ready
    | Accepted
    | Rejected
    | StepDeltas
    | Stats
    | CacheChanged
    | ControlReply
    | WeightsChanged
    | WeightReply
    | Fatal
)

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[Data], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[Data], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
