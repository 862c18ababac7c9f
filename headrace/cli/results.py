"""The result file of ``headrace run``: JSONL that takes the place of an earlier file only when the run has ended."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO

from headrace.cli.errors import print_note, printable
from headrace.errors import ConfigError, EngineError
from headrace.host.user_files import check_output, is_stream, open_stream

if TYPE_CHECKING:
    from headrace.outputs import RequestOutput


def line_key(record: Mapping[str, Any]) -> str:
    """Returns the key by which a resumed run finds a line: its ``custom_id`` or ``id``, or its number where it has none."""
    name = "custom_id" if "custom_id" in record else "line" if record.get("id") is None else "id"
    return f"{name} {record[name]!r}"


def has_answer(record: Mapping[str, Any]) -> bool:
    """Whether the line of a result file is not an error."""
    response = record.get("response")
    return "outputs" in record or (response is not None and response["status_code"] == 200)


class ResultFile:
    """Writes records to ``FILE.partial``, and renames it to ``FILE`` at the end. A run that ends early leaves the partial file,
    which ``resume`` continues: it keeps the results and drops errors and a half-written line.

    Writes directly to standard output (no path), and to a path that is not a regular file, such as a pipe.
    """

    def __init__(self, path: Path | None, source: Path | None, *, resume: bool = False, option: str = "--output") -> None:
        """``source``: the input file; None: standard input. ``option``: what errors name.

        Raises:
            ConfigError: the file cannot be written, is the input, or would replace results of a run that ended early.
        """
        self._option = option
        self.done: Counter[str] = Counter()
        """Key of each line that has a result -> how many results."""
        self._path: Path | None = None
        self._file: BinaryIO = sys.stdout.buffer
        check_output(path, option)
        try:
            if path is not None and not is_stream(path):
                self._path = path.resolve()
                self._partial = self._path.with_name(self._path.name + ".partial")
            _refuse_same(source, [1] if path is None else [path] if self._path is None else [self._path, self._partial])
            if self._path is not None:
                self._prepare(self._path, resume)
                self._file = self._partial.open("ab", buffering=0)
            elif path is not None:
                self._file = open_stream(path, option)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", option) from None

    def _prepare(self, path: Path, resume: bool) -> None:
        """Makes the partial file hold what is kept of earlier results."""
        if not resume:
            if self._partial.exists() and self._partial.stat().st_size:
                raise ConfigError(
                    f"{self._partial} has the results of a run that ended early: continue it with --resume, or delete it",
                    self._option,
                )
            return
        earlier = self._partial if self._partial.exists() else path
        if earlier.exists():
            kept = self._partial.with_name(self._partial.name + ".tmp")
            with kept.open("wb") as file:
                file.writelines(self._results(earlier))
            kept.replace(self._partial)

    def _results(self, earlier: Path) -> Iterator[bytes]:
        """The lines with results."""
        with earlier.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    record = json.loads(line)
                    key, has_result = line_key(record), has_answer(record)
                except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                    raise ConfigError(f"line {number} of {earlier} is not a result of a run", "--resume") from None
                if has_result:
                    self.done[key] += 1
                    yield line

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a line, whole on return.

        Raises:
            EngineError: it cannot be written, as on a full disk.
        """
        try:
            data = json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            # A lone surrogate of the input, quoted in an error: only an escape can write it.
            data = json.dumps(record).encode()
        data += b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise EngineError(f"cannot write {self._file.name}: {error.strerror}") from None

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._path is None:
            return
        self._file.close()
        if error is None:
            if self._path.exists():
                shutil.copymode(self._path, self._partial)
            self._partial.replace(self._path)
        elif not self._partial.stat().st_size:
            self._partial.unlink()
        else:
            kept = f"results so far are in {self._partial}: continue with --resume"
            if isinstance(error, EngineError):
                raise EngineError(f"{str(error).partition(chr(10))[0]}; {kept}") from error
            print_note(kept)


class Texts:
    """Results for a person at a terminal. Where there is one text it is written as it comes.

    Args:
        several: there are several texts; each has its number before it.
    """

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self._written = ""
        """The part of the only text that is written."""
        self._ended = True
        """The last line is complete."""

    def show(self, so_far: RequestOutput) -> None:
        """Writes what is new of the only text.

        A prompt whose engine died is run again, and its text begins anew: it goes on where the earlier one ended if the two
        agree until there, and else it is written from its start.
        """
        text = so_far.outputs[0].text
        if not self._several and not self._written.startswith(text):
            self._go_on(text)

    def _go_on(self, text: str) -> None:
        if not text.startswith(self._written):
            self.end_line()
            print_note("the engine died, and the answer begins again")
            self._written = ""
        self._write(text[len(self._written) :])
        self._written = text

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the texts of a result; errors are reported elsewhere, on a line of their own."""
        if "outputs" not in record:
            self.end_line()
        for output in record.get("outputs", ()):
            if self._several:
                number = f"{record['line']}" if len(record["outputs"]) == 1 else f"{record['line']}.{output['index'] + 1}"
                self._write(f"[{number}] {output['text']}")
            elif output["text"] != self._written:
                self._go_on(output["text"])
            self._write("\n")
            if output["finish_reason"] == "length":
                print_note(f"stopped at {len(output['token_ids']):,} tokens; --max-tokens or the context sets the limit")

    def end_line(self) -> None:
        """Ends the line that is under way, so that an error has one of its own."""
        if not self._ended:
            self._write("\n")

    def _write(self, text: str) -> None:
        print(printable(text), end="", flush=True)
        self._ended = text.endswith("\n")


def _refuse_same(source: Path | None, targets: list[Path | int]) -> None:
    """Raises ConfigError if one of the targets, paths or descriptors, is the input, by whatever name."""
    given = _status(0 if source is None else source)
    for target in targets:
        if given is not None and (status := _status(target)) is not None and os.path.samestat(given, status):
            raise ConfigError("the input cannot be the output: results would replace the prompts", "--output")


def _status(file: Path | int) -> os.stat_result | None:
    """Returns the status of a regular file; None: it is none, or is not there."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None
