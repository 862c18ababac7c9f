"""ProgressBar: finished prompts and generated tokens, on standard error."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace.errors import RequestError


class ProgressBar:
    """Shown while ``bar`` is entered."""

    def __init__(self, total: int | None, *, shown: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self.bar.add_task("prompts", total=total)
        self._tokens = 0

    def add(self, num_tokens: int, finished: bool) -> None:
        """Counts tokens, and a prompt if it has finished."""
        if not self.bar.disable:
            self._tokens += num_tokens
            self.bar.update(self._task, advance=int(finished), description=f"{self._tokens:,} tokens")


def bar_shown(progress: bool, use_tqdm: bool | None) -> bool:
    """Whether a call shows its progress. ``use_tqdm``: vLLM's name, which replaces ``progress`` where it is given."""
    if use_tqdm is None:
        return progress
    if not isinstance(use_tqdm, bool):
        raise RequestError("use_tqdm must be true or false: the bar is headrace's own, and takes no class", "use_tqdm")
    return use_tqdm
