"""The process that plans engines: ``python -m headrace.server.models.plan_worker``."""

from __future__ import annotations

import msgspec

from headrace.config import EngineArgs
from headrace.errors import ConfigError
from headrace.frontend.plan import planned
from headrace.host.parent import Parent, run
from headrace.server.models.plan import Planned


def _plan(args: EngineArgs) -> Planned:
    try:
        info, refusal = planned(args)
        if refusal is not None:
            raise refusal
    except ConfigError as error:
        return Planned(None, error.message, error.param, 0)
    from headrace.startup.environment import probe

    device = probe(args.device)
    machine = device.available_memory
    if device.cuda:
        machine -= int((1 - args.gpu_memory_utilization) * device.total_memory)
        if args.kv_cache_memory is None and args.num_kv_blocks is None:
            message = "without it the KV cache takes all of the GPU's memory that is free, and leaves none to other models"
            return Planned(None, f"kv_cache_memory must be set: {message}", "kv_cache_memory", machine)
    return Planned(info, "", None, machine)


def main(parent: Parent) -> int:
    args = msgspec.msgpack.decode(bytes(parent.receive()), type=list[EngineArgs])
    parent.send(msgspec.msgpack.encode([_plan(each) for each in args]))
    return 0


if __name__ == "__main__":
    run(main)
