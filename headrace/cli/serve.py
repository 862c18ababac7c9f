"""``headrace serve``: the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import msgspec

from headrace.cli.options import ENGINE_FIELDS, Group, check_names, command
from headrace.cli.own_options import LogOptions
from headrace.config import EngineArgs
from headrace.core.weights import OF_FILES, ServedWeights
from headrace.host.clock import process_start
from headrace.processes.early import hints
from headrace.processes.spawn import COMMAND, spawn
from headrace.server.listen import address, listen
from headrace.server.models.options import ModelsOptions
from headrace.server.settings import ServerSettings
from headrace.server.supervisor import KeptBytes, supervised

LOG_OPTIONS: Group[LogOptions] = Group.of(LogOptions)
SERVER_OPTIONS: Group[ServerSettings] = Group.of(ServerSettings)
MODELS_OPTIONS: Group[ModelsOptions] = Group.of(ModelsOptions)


class LossyStream:
    """A text stream that drops what it cannot write: a full disk, or a reader that left, must not end what only reports."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def set_up_logs(level: str) -> None:
    """``level`` holds for headrace; libraries speak up from warnings on."""
    # Python has None in place of a stream that its caller closed.
    sys.stdout, sys.stderr = (LossyStream(stream) if stream else stream for stream in (sys.stdout, sys.stderr))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("headrace").setLevel(level.upper())


def served_before(kept: KeptBytes) -> ServedWeights:
    """Returns the weights that a server's process served before this one."""
    content = kept.read()
    return msgspec.msgpack.decode(content, type=ServedWeights) if content else OF_FILES


@command(args=ENGINE_FIELDS, settings=SERVER_OPTIONS, models=MODELS_OPTIONS, logging=LOG_OPTIONS)
def serve(args: EngineArgs, settings: ServerSettings, models: ModelsOptions, logging: LogOptions) -> None:
    """Serve a model over HTTP, in the shape of OpenAI's API.

    Without MODEL it serves a small embedded one, so that `headrace serve` works on a machine with no GPU and no network.
    """
    set_up_logs(logging.log_level)
    if models.models_config is not None:
        _serve_several(args, settings, models, models.models_config)
        return
    check_names(args)
    sockets, began = listen(settings), process_start()
    server = supervised()
    # Before anything else is imported: the engine's process imports its own part beside this one.
    spawned = spawn((*COMMAND, *hints(args)), process_start() if server.restarts else began)
    from rich.console import Console

    from headrace.cli.startup import AnnouncedLLM, print_report, print_summary
    from headrace.server.app import build_app
    from headrace.server.run import run_app

    console = Console(stderr=True)
    report = print_report if logging.report else partial(print_summary, address=address(settings, sockets))
    served = served_before(server.kept)
    llm = AnnouncedLLM(args, console, report, chat_template=settings.chat_template, spawned=spawned, served=served)
    llm.weights.on_change = lambda served: server.kept.write(msgspec.msgpack.encode(served))
    run_app(build_app(llm, settings), sockets, server.ready)


def _serve_several(args: EngineArgs, settings: ServerSettings, options: ModelsOptions, path: Path) -> None:
    from headrace.cli.models.hosted import read_models

    declared = read_models(path, args, settings)
    sockets = listen(settings)
    server = supervised()
    from rich.console import Console

    from headrace.cli.startup import print_models
    from headrace.server.models.app import build_host
    from headrace.server.models.host import ModelHost
    from headrace.server.run import run_app

    host = ModelHost(declared, settings, options)

    def on_ready() -> None:
        print_models(Console(stderr=True), host.summary(), host.table.budget, address(settings, sockets))
        server.ready()

    run_app(build_host(host), sockets, on_ready)
