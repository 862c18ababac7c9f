"""PlaceCopies: adapters on their way to their places on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch

PIECE = 4 << 20
"""Bytes of a piece. The driver lets no step be launched while memory for one is pinned, and a step's own copies wait for one
that is under way."""
AT_ONCE = 8
"""Pieces that are sent at a time. The engine looks after adapters every 10 milliseconds, of which these take one or two on the
bus."""


class PlaceCopies:
    """Copies adapters piece by piece, on a separate stream while steps are in flight."""

    def __init__(self, memory: torch.Tensor) -> None:
        """``memory``: ``[places, numbers]`` on the GPU."""
        self._memory = memory
        self._left: dict[int, deque[tuple[int, torch.Tensor]]] = {}
        """place -> the pieces to be sent, and where they begin. No step has waited for those that were."""
        self._open()

    def pieces(self, image: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cuts what a place is to hold, ``[numbers]`` in the host's memory, into pieces that can be copied while steps run."""
        numbers = PIECE // image.itemsize
        return [self._pin(image[start : start + numbers]) for start in range(0, len(image), numbers)]

    def begin(self, place: int, pieces: Sequence[torch.Tensor]) -> None:
        """Makes the pieces those of a place. They are written once no step in flight reads what it held."""
        starts, start = deque[tuple[int, torch.Tensor]](), 0
        for piece in pieces:
            starts.append((start, piece))
            start += len(piece)
        self._left[place] = starts
        self._wait_for_steps(place)

    def under_way(self, place: int) -> bool:
        """Whether pieces of the place are to be sent."""
        return bool(self._left.get(place))

    def go_on(self, place: int) -> bool:
        """Sends some of the place's pieces. Returns whether none is left."""
        if self.under_way(place):
            self._send(place, AT_ONCE)
        return not self.under_way(place)

    def finish(self, place: int) -> None:
        """Sends what is left of the place's pieces. Later steps wait for all of them."""
        if place in self._left:
            self._send(place, len(self._left[place]))
            del self._left[place]
            self._make_steps_wait()

    def _send(self, place: int, count: int) -> None:
        left = self._left[place]
        for start, piece in [left.popleft() for _ in range(min(count, len(left)))]:
            self._copy(self._memory[place, start : start + len(piece)], piece)

    # The calls to the GPU.

    def _open(self) -> None:
        self._stream = torch.cuda.Stream(self._memory.device)  # type: ignore[no-untyped-call]
        self._used: dict[int, torch.cuda.Event] = {}
        """place -> the end of the last step that had its adapter"""

    def _pin(self, piece: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(self._memory.device):
            return piece.pin_memory()

    def _copy(self, target: torch.Tensor, piece: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(piece, non_blocking=True)

    def _wait_for_steps(self, place: int) -> None:
        if place in self._used:
            self._stream.wait_event(self._used.pop(place))

    def _make_steps_wait(self) -> None:
        torch.cuda.current_stream(self._memory.device).wait_stream(self._stream)

    def used(self, places: Collection[int]) -> None:
        """A step that has been launched reads the places."""
        if places:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._memory.device))
            self._used |= dict.fromkeys(places, done)
