"""``headrace serve``: what it says before it serves."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from headrace.cli.serve import set_up_logs

MISSING = """
import os, sys
from headrace.cli.main import app
os.chdir({folder!r})
try:
    app({arguments!r})
except SystemExit as error:
    print(error.code, [name for name in ("torch", "transformers", "fastapi", "uvicorn") if name in sys.modules])
"""


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./missing.gguf", "there is no file or directory ./missing.gguf"),
        ("no/such/folder", "there is no file or directory no/such/folder"),
        ("model.bin", "model.bin: pickled weights can run code when they are read, so they are not"),
        ("notes.txt", "notes.txt is a file, but not a GGUF file"),
    ],
)
def test_a_wrong_model_is_told_before_anything_is_imported(command: str, name: str, why: str, tmp_path: Path) -> None:
    for file in ("model.bin", "notes.txt"):
        (tmp_path / file).write_text("x")
    code = MISSING.format(folder=str(tmp_path), arguments=[command, name])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert why in " ".join(done.stderr.split())
    assert "listening" not in done.stderr
    assert done.stdout.strip() == "2 []"


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
