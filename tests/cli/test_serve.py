"""``headrace serve``: what it says before it serves."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli.serve import set_up_logs


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_reports_on_a_full_disk_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        stream = io.TextIOWrapper(io.BufferedWriter(io.FileIO("/dev/full", "w")), line_buffering=True)
        with pytest.raises(OSError, match="No space"):
            print("x", file=stream)
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    set_up_logs("info")
    Console(stderr=True).print("the report")
    print("a line", flush=True)
    sys.stderr.write("x")
    sys.stderr.flush()
    assert sys.stderr.fileno() > 2 and not sys.stdout.isatty()
