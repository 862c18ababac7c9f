"""Files that a user names may be pipes, of which some have nothing to say."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.host.user_files import read_text


def test_a_pipe_that_no_program_writes_is_refused(tmp_path: Path) -> None:
    """An empty configuration or template would be used in place of what was meant."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="a pipe that no program writes") as refused:
        read_text(tmp_path / "pipe", "--config")
    assert refused.value.param == "--config"


@pytest.mark.parametrize("late", [False, True])
def test_a_pipe_of_the_shell_is_read(late: bool) -> None:
    """``<(command)`` names a pipe whose writer has it open: with text in it, or before it writes any."""
    reader, writer = os.pipe()

    def write() -> None:
        os.write(writer, b"port: 1\n")
        os.close(writer)

    waits = threading.Timer(0.2, write)
    try:
        waits.start() if late else write()
        assert read_text(Path(f"/dev/fd/{reader}"), "--config") == "port: 1\n"
    finally:
        waits.join() if late else None
        os.close(reader)


def test_an_empty_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_text(tmp_path / "file", "--config") == ""
