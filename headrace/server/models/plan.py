"""Plans of engines: what the memory ledger of each would be, found out in a process of its own, which imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.config import EngineArgs
from headrace.engine.info import EngineInfo
from headrace.errors import ConfigError
from headrace.host.child import ChildProcess, python


class Planned(msgspec.Struct, frozen=True, array_like=True):
    """The plan of one engine."""

    info: EngineInfo | None
    """None: it cannot be built."""
    refusal: str
    """Reason for which it cannot be built or does not fit into the machine's memory; empty: it does."""
    param: str | None
    """The argument at fault."""
    machine: int
    """Bytes of the device's memory that engines with these arguments may take."""


async def plan_engines(args: Sequence[EngineArgs]) -> list[Planned]:
    """The plans of engines, in their order. Reads the models' files, and downloads those that the hub's cache lacks.

    Raises:
        EngineError: the process cannot be started.
        ConfigError: it ended.
    """
    child = ChildProcess(python("headrace.server.models.plan_worker"), "the process that plans the models' memory")
    child.send(msgspec.msgpack.encode(list(args)))
    try:
        answer = await asyncio.to_thread(child.receive)
        return msgspec.msgpack.decode(bytes(answer), type=list[Planned])
    except EOFError:
        raise ConfigError("the process that plans the models' memory ended; standard error says why", "models_config") from None
    finally:
        child.kill()  # Also ends the thread's wait where the server does not want the answer any more.
        await asyncio.to_thread(child.end)
