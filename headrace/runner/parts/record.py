"""Recording the stream of plans.

A file is a header and then the plans, in the order of their execution, with the events between them that bear on later steps:
when a CUDA graph was captured is decided by a clock, and what an update of weights wrote is in no plan. Each record is four
bytes of length (little-endian) and that many bytes of msgpack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.config import EngineConfig
from headrace.core.plan import Recorded, RunnerEvent, encode_plan
from headrace.errors import ConfigError
from headrace.host.user_files import is_stream, open_stream
from headrace.model_spec import ModelSpec
from headrace.runner.part import RunnerPart

logger = logging.getLogger("headrace.engine")

FORMAT = "headrace plans 3"
LENGTH_BYTES = 4


class Header(msgspec.Struct, frozen=True):
    format: str
    fingerprint: dict[str, str]


def fingerprint(config: EngineConfig) -> dict[str, str]:
    """Returns the properties that must be equal for plans to mean the same, by name. Tensor-parallel ranks have the same
    ones."""
    scheduler, model = config.scheduler, config.model
    if isinstance(model, ModelSpec) and model.shard is not None:
        model = model.shard.whole
    attention = [*dict.fromkeys(config.attention_backends), *([config.sparse.name] if config.sparse is not None else [])]
    return {
        "model": _digest(dataclasses.asdict(model)),
        "cache": _digest(dataclasses.asdict(config.cache)),
        "max_model_len": str(scheduler.max_model_len),
        "max_num_seqs": str(scheduler.max_num_seqs),
        "dtype": config.dtype,
        "quantization": config.quantization,
        "attention_backends": ", ".join(attention),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=dict).encode()).hexdigest()[:16]


class Recorder(RunnerPart):
    """Writes plans to a file, each before it is executed, so that the file includes the plan that crashed.

    A failing write ends the recording, not the engine. What was written before stays readable.
    """

    def __init__(self, path: str | Path, config: EngineConfig) -> None:
        """``path``: of the file; where it exists, a number is added, so that no record is ever overwritten.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            self._file: BinaryIO | None = _create(Path(path))
            self._put(self._file, msgspec.msgpack.encode(Header(FORMAT, fingerprint(config))))
        except OSError as error:
            raise ConfigError(f"the steps cannot be recorded in {path}: {error.strerror}", "record_steps") from error
        logger.info("steps are recorded in %s", self._file.name)

    def note(self, event: Recorded) -> None:
        """Writes it."""
        if self._file is None:
            return
        try:
            self._put(self._file, encode_plan(event))
        except OSError as error:
            where = f"an event ({event.what})" if isinstance(event, RunnerEvent) else f"step {event.step}"
            logger.error("the recording in %s ends before %s: %s", self._file.name, where, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            # Closing writes what is buffered, which fails again on a full disk; the descriptor is freed all the same.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    @staticmethod
    def _put(file: BinaryIO, data: bytes) -> None:
        file.write(len(data).to_bytes(LENGTH_BYTES, "little"))
        file.write(data)
        file.flush()


def _create(path: Path) -> BinaryIO:
    """Opens the first of ``path``, ``path.1``, ``path.2``, ... that does not exist. A pipe or a device is opened as it is."""
    if is_stream(path):
        return open_stream(path, "record_steps")
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(1)))
    return next(file for name in names if (file := _create_new(name)) is not None)


def _create_new(path: Path) -> BinaryIO | None:
    """None if ``path`` exists."""
    try:
        return path.open("xb")
    except FileExistsError:
        return None
