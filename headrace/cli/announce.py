"""An engine client that prints its start-up: progress while it loads, then the report."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text

from headrace.cli.startup import print_report
from headrace.config import EngineArgs
from headrace.engine.info import Progress
from headrace.frontend.async_llm import AsyncLLM
from headrace.processes.spawn import Spawned


class AnnouncedLLM(AsyncLLM):
    """Prints to ``console``; the progress only where that is a terminal."""

    def __init__(
        self,
        args: EngineArgs,
        console: Console,
        *,
        chat_template: str | None = None,
        report: bool = True,
        spawned: Spawned | None = None,
    ) -> None:
        self._console = console
        self._report = report
        self._status: Status | None = None
        super().__init__(args, on_progress=self._show, chat_template=chat_template, spawned=spawned)

    async def start(self) -> None:
        with self._console.status("starting the engine") as self._status:
            try:
                await super().start()
            finally:
                self._status = None

    def serving(self) -> None:
        super().serving()
        if self._report:
            print_report(self._console, self.info)

    def _show(self, progress: Progress) -> None:
        if self._status is not None:
            self._status.update(Text(describe(progress)))


def describe(progress: Progress) -> str:
    """One line: "weights 42 % model.layers.3..." """
    share = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    return f"{progress.phase}{share} {progress.detail}".rstrip()
