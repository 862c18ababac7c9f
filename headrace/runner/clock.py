"""Stopwatch: the time between marks of a step, on the device that runs it."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Marks are taken in the device's stream; reading them waits for the device to have passed them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def wait(self) -> None:
        """Waits until the device has passed the last mark."""
        last = self._marks[-1]
        if not isinstance(last, float):
            last.synchronize()

    def seconds(self) -> list[float]:
        """Returns the seconds between each mark and the next."""
        return [_between(first, second) for first, second in zip(self._marks, self._marks[1:], strict=False)]


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, float) and isinstance(second, float):
        return second - first
    if isinstance(first, float) or isinstance(second, float):
        raise TypeError("marks of one stopwatch are of one kind")
    second.synchronize()
    return float(first.elapsed_time(second)) / 1000.0
