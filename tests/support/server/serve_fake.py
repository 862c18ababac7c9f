"""A server over the fake engine in a process of its own: ``python serve_fake.py '{"step": 0.1, "settings": {...}}'``."""

from __future__ import annotations

import gc
import json
import logging
import sys
from pathlib import Path

from headrace.server import supervisor
from headrace.server.app import build_app
from headrace.server.listen import listen
from headrace.server.run import run_app
from headrace.server.settings import ServerSettings
from headrace.server.supervisor import Supervised, supervised

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.server.fakes import FakeLLM


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = ServerSettings(**options.get("settings", {}))
    sockets = listen(settings)
    supervisor._QUICK_SECONDS = options.get("quick_seconds", supervisor._QUICK_SECONDS)
    server = supervised() if options.get("supervised") else Supervised(0, lambda: None, supervisor.KeptBytes())
    llm = FakeLLM(step=options.get("step", 0.0), load_seconds=options.get("load", 0.0))
    if "start_error" in options:
        llm.start_error = ValueError(options["start_error"])
    run_app(build_app(llm, settings), sockets, server.ready)
    print(f"aborted {len(llm.aborted)} closed {llm.closed} settled {gc.get_freeze_count() > 0}")


if __name__ == "__main__":
    main()
