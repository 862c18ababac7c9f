"""The process that downloads a model of the hub into its cache: ``python -m headrace.sources.pull_worker``."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from headrace.errors import ConfigError
from headrace.host.parent import Parent, run
from headrace.sources.hub import fetch, split_name

_REPORT_SECONDS = 0.5


class Pulled(msgspec.Struct, frozen=True, array_like=True):
    """A report of a download."""

    nbytes: int
    """Bytes of the repository in the cache."""
    done: bool = False
    """Whether this is the last report."""
    error: str = ""
    """Reason for which the model was not downloaded."""


def main(parent: Parent) -> int:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    model = bytes(parent.receive()).decode()
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=split_name(model)[0], repo_type="model") / "blobs"
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_REPORT_SECONDS):
            parent.send(msgspec.msgpack.encode(Pulled(_size(folder))))

    reporting = threading.Thread(target=report)
    reporting.start()
    error = ""
    try:
        fetch(model, None, "auto")
    except ConfigError as refused:
        error = refused.message
    finally:
        ended.set()
        reporting.join()
    parent.send(msgspec.msgpack.encode(Pulled(_size(folder), True, error)))
    return 0


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, from which the hub's client may be moving files."""
    total = 0
    for file in folder.glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


if __name__ == "__main__":
    run(main)
