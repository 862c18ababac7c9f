"""``headrace serve``: the OpenAI-compatible server."""

from __future__ import annotations

from rich.console import Console

from headrace.cli import logs
from headrace.cli.options import ENGINE_OPTIONS, Group, command
from headrace.cli.own_options import LogOptions
from headrace.config import EngineArgs
from headrace.host.clock import process_start
from headrace.processes.spawn import spawn
from headrace.server.listen import listen
from headrace.server.settings import ServerSettings
from headrace.server.supervisor import supervised
from headrace.sources.locate import locate

LOG_OPTIONS: Group[LogOptions] = Group.of(LogOptions)
SERVER_OPTIONS: Group[ServerSettings] = Group.of(ServerSettings)


@command(args=ENGINE_OPTIONS, settings=SERVER_OPTIONS, logging=LOG_OPTIONS)
def serve(args: EngineArgs, settings: ServerSettings, logging: LogOptions) -> None:
    """Serve a model over HTTP, in the shape of OpenAI's API.

    Without MODEL it serves a small embedded one, so that `headrace serve` works on a machine with no GPU and no network.
    """
    locate(args.model)  # Reports a mistyped name before anything heavy is imported and the port is taken.
    logs.set_up(logging.log_level)
    sockets, began = listen(settings), process_start()
    server = supervised()
    # Before anything else is imported: the engine's process imports its own part beside this one.
    spawned = spawn(origin=process_start() if server.restarts else began)
    from headrace.cli.announce import AnnouncedLLM
    from headrace.server.run import run

    console = Console(stderr=True)
    llm = AnnouncedLLM(args, console, chat_template=settings.chat_template, spawned=spawned)
    run(llm, settings, sockets, server.ready)
