"""PendingRequests: the prompts of a call of ``LLM`` as requests, in order, while threads process the media of later ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

from headrace.core.request import Request
from headrace.frontend.inputs import InputProcessor, Prompt
from headrace.options import shown

if TYPE_CHECKING:
    from headrace.multimodal.processor import PreparedPrompt

Make = Callable[[int, "PreparedPrompt | None"], Request]
"""(index of the prompt, its media where it has any) -> its request."""


class PendingRequests:
    """
    Args:
        make: called in the order of the prompts, in the thread of the caller.
        most: requests with media that the engine has at once: processed pictures are large.
    """

    def __init__(self, prompts: Sequence[Prompt], inputs: InputProcessor, make: Make, most: int) -> None:
        self._prompts, self._inputs, self._make, self._most = deque(prompts), inputs, make, most
        self._media: deque[Future[PreparedPrompt] | None] = deque()
        """Media of the first of ``_prompts``."""
        self._made: deque[Request] = deque()
        self._num_made = 0
        self._running: set[str] = set()
        """Ids of requests with media."""

    def __len__(self) -> int:
        """Requests that are left."""
        return len(self._made) + len(self._prompts)

    def make_all(self) -> list[Request]:
        """Makes all requests before the first one runs. Raises RequestError if a prompt cannot be served."""
        while self._prompts:
            self._make_next(wait=True)
        return list(self._made)

    def first(self, *, wait: bool) -> Request | None:
        """The next request. None: its media are not processed yet, or the engine has enough requests with media.

        Args:
            wait: until its media are processed.

        Raises:
            RequestError: the prompt cannot be served.
        """
        if not self._made and len(self._running) < self._most:
            self._make_next(wait=wait)
        return self._made[0] if self._made else None

    def pop(self) -> None:
        """The first has been added to the engine."""
        request = self._made.popleft()
        if request.media:
            self._running.add(request.request_id)

    def ended(self, request_id: str) -> None:
        self._running.discard(request_id)

    def cancel(self) -> None:
        """Gives up what is left."""
        for media in filter(None, self._media):
            media.cancel()

    def _make_next(self, *, wait: bool) -> None:
        while len(self._media) < min(self._inputs.media_ahead, len(self._prompts)):
            self._media.append(self._inputs.prepare_media(self._prompts[len(self._media)]))
        media = self._media[0]
        if media is not None and not wait and not media.done():
            return
        request = self._make(self._num_made, None if media is None else media.result())
        self._made.append(request)
        self._num_made += 1
        self._prompts.popleft()
        self._media.popleft()


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Raises: TypeError: names the prompt that is none."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, dict):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a string, a dict or a list of them, not {shown(prompts)}")
    several = list(prompts)
    for index, prompt in enumerate(several):
        if not isinstance(prompt, (str, dict)):
            raise TypeError(f"prompts[{index}] must be a string or a dict, not {shown(prompt)}")
    return several
