"""``headrace serve``: what it says before it serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
