"""Numbers of media that are decoded and processed at once, and of the cores of each."""

from __future__ import annotations

import os
import sys
import threading

_MAX_WORKERS = 4


def media_workers(asked: int | None) -> int:
    """The number of ``media_workers``, unless it was asked for."""
    return asked or max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) // 2))


def use_one_core() -> None:
    """Lets torch's operators, with which torchvision resizes pictures, use one core in the calling thread.

    Several threads with a team of cores each would wait for one another. Processes that have not imported torch do without it.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    # It also became the number of threads that are yet to use torch.
    restoring = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restoring.start()
    restoring.join()
