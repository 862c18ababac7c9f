"""Commands to the weights of a running engine, and to those of an executor's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from headrace.core.weights import MEMORY_TAGS, DeviceMemory, GroupSpec, PartSum, PauseMode, SleepTag, Source
from headrace.errors import WeightsError
from headrace.host.tagged import Tagged


class Pause(Tagged, frozen=True):
    """Answered once no step is in flight."""

    mode: PauseMode


class Resume(Tagged, frozen=True):
    pass


class Begin(Tagged, frozen=True):
    """Begins an update. Where the engine serves, pauses it (keep) until the update ends."""

    checksums: bool = False
    """Its end compares what came with the sender's sums."""


class Load(Tagged, frozen=True):
    """Writes weights. Answered once they are written."""

    source: Source


class Finish(Tagged, frozen=True):
    """Ends an update: from here on the engine has new weights."""

    number: int
    """The new version's number, unless the engine has a higher one already."""
    version: str | None = None
    """Name of the new version; None: its number."""
    checksums: dict[str, int] = {}
    """Name of a tensor -> its sum at the sender. If another tensor came, the weights are torn."""


class Fail(Tagged, frozen=True):
    """Gives an update up. The weights are torn if something was written."""

    reason: str


class Lose(Tagged, frozen=True):
    """The other replicas have later weights than this engine."""

    number: int
    version: str


class AcceptFiles(Tagged, frozen=True):
    """Accepts the weights of the engine's files in place of the later ones that it had."""


class Rename(Tagged, frozen=True):
    """Makes the present weights a new version, which was written by other means or has another name."""

    version: str | None
    """Name of the version; None: its number."""


class Join(Tagged, frozen=True):
    """Answered once all members are there. A group of the same name is left first."""

    group: GroupSpec
    replica: int = 0
    """Number of the engine among its replicas."""


class Leave(Tagged, frozen=True):
    name: str


class Export(Tagged, frozen=True):
    """Sends all weights to one replica, while this one goes on. Answered at once."""

    folder: str
    """Has a socket of each rank."""


class Checksums(Tagged, frozen=True):
    """Asks for the sums of all weights."""


class Sleep(Tagged, frozen=True):
    """Pauses the engine, and gives memory back. Answered once it is free."""

    level: Literal[0, 1, 2]
    """0: only the steps sleep. 1: host memory keeps the weights. 2: the weights are dropped."""
    mode: PauseMode = "abort"
    tags: tuple[SleepTag, ...] = MEMORY_TAGS
    until_update: bool = False
    """The end of the next update wakes everything. At level 2 weights are kept all the same if the model's files cannot be that
    update."""


class Wake(Tagged, frozen=True):
    """Takes memory again. Answered once it is there."""

    tags: tuple[SleepTag, ...] | None = None
    """None: all."""


WeightCommand = (
    Pause
    | Resume
    | Begin
    | Load
    | Finish
    | Fail
    | Lose
    | AcceptFiles
    | Rename
    | Join
    | Leave
    | Export
    | Checksums
    | Sleep
    | Wake
)


def check(command: WeightCommand) -> None:
    """Checks the values of a command that comes from a user's program: the engine's process would die of a wrong type.

    Raises:
        WeightsError: a field has a value that it may not have (400).
    """
    for field in msgspec.structs.fields(command):
        value = getattr(command, field.name)
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except (msgspec.ValidationError, TypeError) as error:
            if words := list(_words(field.type)):
                how = "be some of" if isinstance(value, tuple) else "be one of"
                raise WeightsError(f"{field.name} must {how} {', '.join(map(str, words))}, not {value!r}", 400) from None
            raise WeightsError(f"{field.name}: {str(error).partition(' - at ')[0]}", 400) from None


def _words(kind: Any) -> Iterator[object]:
    """The values of the literals within a type."""
    for one in get_args(kind):
        if get_origin(kind) is Literal:
            yield one
        else:
            yield from _words(one)


# To ranks


class Check(Tagged, frozen=True):
    """Opens a source, and finds places for its tensors."""

    source: Source


class Receive(Tagged, frozen=True):
    """Begins to write the tensors of the source that was checked."""

    checksums: bool = False
    """Keeps the sum of each tensor that comes, until ``Forget``."""


class Compare(Tagged, frozen=True):
    """Compares sums of tensors with those of what came. The error names those that differ."""

    checksums: dict[str, int]


class JobEnded(Tagged, frozen=True):
    """Asks whether a job has ended: a load, or the joining of a group."""

    job: str
    """Name of the group; empty: the load."""


class Drop(Tagged, frozen=True):
    """Closes the source that was checked."""


class Forget(Tagged, frozen=True):
    """Starts a new count of the tensors that are written."""


class Missing(Tagged, frozen=True):
    """Asks which tensors were not written since ``Forget``."""


class Release(Tagged, frozen=True):
    """Gives memory back. Memory that was given back already is left as it is."""

    tags: tuple[SleepTag, ...]
    drop: bool
    """Weights that an update can write are not kept."""


class Restore(Tagged, frozen=True):
    """Takes memory again, with the weights that were kept, and zeros for KV."""

    tags: tuple[SleepTag, ...]


RankCommand = (
    Check | Receive | Compare | JobEnded | Drop | Forget | Missing | Join | Leave | Export | Checksums | Release | Restore
)


class RankReply(msgspec.Struct, frozen=True, array_like=True):
    done: bool = True
    error: str = ""
    written: int = 0
    """Tensors: of the load so far, or with ``Missing`` since ``Forget``."""
    missing: list[str] = []
    fixed: list[str] = []
    """With ``Missing``: tensors that only the model's files write."""
    memory: list[DeviceMemory] = []
    """With ``Release``."""
    checksums: dict[str, list[PartSum]] = {}
    tied: dict[str, str] = {}
