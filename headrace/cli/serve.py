"""``headrace serve``: the OpenAI-compatible server."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from headrace.cli.engine_options import ENGINE
from headrace.cli.options import DEBUGGING, command
from headrace.cli.server_options import SERVER
from headrace.config import EngineArgs
from headrace.server.settings import ServerSettings
from headrace.sources.locate import locate


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


@command(args=ENGINE, settings=SERVER)
def serve(
    args: EngineArgs,
    settings: ServerSettings,
    log_level: Annotated[
        LogLevel,
        typer.Option(
            "--log-level",
            help="How much to log. debug adds a line for every step a request takes through the engine's process.",
            rich_help_panel=DEBUGGING,
        ),
    ] = LogLevel.info,
) -> None:
    """Serve a model over HTTP, in the shape of OpenAI's API.

    Without MODEL it serves a small embedded one, so that `headrace serve` works on a machine with no GPU and no network.
    """
    locate(args.model)  # A mistyped name is told before anything heavy is imported, and before the port is taken.
    from headrace.cli import logs
    from headrace.cli.announce import AnnouncedLLM
    from headrace.server.run import run

    logs.set_up(log_level.value)
    run(AnnouncedLLM(args, Console(stderr=True), chat_template=settings.chat_template), settings)
