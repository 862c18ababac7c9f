"""A process that sends its share of a load: ``python -m headrace.bench.client_process``."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.bench.serving import Share, send_share
from headrace.host.parent import Parent, run


def main(parent: Parent) -> int:
    share = msgspec.msgpack.decode(parent.receive(), type=Share)

    def wait() -> None:
        parent.send(b"ready")
        parent.receive()

    parent.send(msgspec.msgpack.encode(asyncio.run(send_share(share, wait))))
    return 0


if __name__ == "__main__":
    run(main)
