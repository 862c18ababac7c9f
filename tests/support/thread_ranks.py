"""Tensor-parallel ranks as threads of one process."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from headrace.config import EngineArgs
from headrace.frontend.local import LocalEngine, open_local
from headrace.parallel.agreement import Agreement
from headrace.parallel.group import ThreadGroup
from headrace.startup.source import FileSource

T = TypeVar("T")


def on_ranks(size: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """Returns the results of ``run`` on each rank. Raises the first exception that is not a consequence of another."""

    def guarded(group: ThreadGroup) -> T | BaseException:
        try:
            return run(group)
        except BaseException as error:
            group.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(guarded, ThreadGroup.make(size)))
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results


class ThreadAgreement(Agreement):
    """``Agreement`` of the threads of a group."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group
        self.size = group.size

    def least(self, number: int) -> int:
        return int(self._group.all_gather(torch.tensor(number)).min())

    def alike(self, value: bytes) -> bool:
        digest = int.from_bytes(hashlib.sha256(value).digest()[:7], "little")
        return len(self._group.all_gather(torch.tensor(digest)).unique()) == 1


def on_engines(args: EngineArgs, size: int, run: Callable[[LocalEngine], T]) -> list[T]:
    """Returns the results of ``run`` with the engine of each rank."""
    if size == 1:
        return [run(open_local(FileSource(args)))]
    args = dataclasses.replace(args, tensor_parallel_size=size)
    return on_ranks(size, lambda group: run(open_local(FileSource(args, ThreadAgreement(group), group))))
