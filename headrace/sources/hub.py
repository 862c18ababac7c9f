"""Models of the Hugging Face hub: downloads into the hub's cache, and what the cache has."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from headrace.errors import ConfigError, did_you_mean, human_size
from headrace.sources.locate import HUB_NAME

_DESCRIPTION = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_SECOND_COPIES = ["*/*", "consolidated*"]
"""Not ours to download: subfolders hold other formats of the same weights, ``consolidated`` is their second copy."""
_MODULES = ["[0-9]_*/config.json"]
"""Configurations of the modules that a sentence-transformers model has behind its layers."""
_LABEL = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q|TQ)\d[A-Z0-9_]*|MXFP4[A-Z0-9_]*|BF16|FP16|F16|F32)$", re.IGNORECASE)
"""The quantisation that ends the name of a GGUF file."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = ("mmproj", "imatrix")
"""Beginnings of the names of GGUF files that hold a vision part or statistics, and no language model."""


def split_name(model: str) -> tuple[str, str | None]:
    """The repository and the quantisation of a hub's name: ``someone/model:Q4_K_M`` is of its GGUF files the one in Q4_K_M."""
    match = HUB_NAME.fullmatch(model)
    return (model, None) if match is None else (match["repo"], match["label"])


def gguf_names(files: Iterable[str]) -> dict[str, str]:
    """GGUF file of a repository -> what names it after the colon: the quantisation that its name ends with, or its whole stem
    where that is not enough. Files that hold no language model are left out."""
    labels = {file: _label(file) for file in files if not _stem(file).startswith(_NO_MODEL)}
    shared = Counter(labels.values())
    return {file: label if shared[label] == 1 else _stem(file) for file, label in labels.items()}


def choose_gguf(repo_id: str, label: str | None, sizes: Mapping[str, int]) -> str:
    """The file that a label names among the GGUF files of a repository; of no label, the only one.

    Args:
        sizes: path in the repository -> bytes.

    Raises:
        ConfigError: none or several of them are meant; it lists what is there.
    """
    names = gguf_names(sizes)
    if not names:
        raise ConfigError(f"{repo_id} has no GGUF files: leave :{label} out", "model")
    meant = [name for name in names if label is None or label.lower() in (_label(name).lower(), _stem(name).lower())]
    if len(meant) == 1:
        return meant[0]
    if meant and all(_PART.search(_stem(name)) for name in meant) and len({_label(name) for name in meant}) == 1:
        raise ConfigError(
            f"{repo_id}:{_label(meant[0])} is split into {len(meant)} files, and only whole files are read: download them and "
            "join them with llama-gguf-split --merge",
            "model",
        )
    listed = ", ".join(f"{repo_id}:{names[name]} ({human_size(sizes[name])})" for name in sorted(meant or names))
    if not meant:
        hint = did_you_mean(str(label), names.values())
        raise ConfigError(f"{repo_id} has no GGUF file of {label}{hint}; there is {listed}", "model")
    raise ConfigError(f"{repo_id} has several GGUF files{f' of {label}' if label else ''}, name one: {listed}", "model")


def _stem(file: str) -> str:
    return file.rpartition("/")[2].removesuffix(".gguf")


def _label(file: str) -> str:
    stem = _PART.sub("", _stem(file))
    match = _LABEL.search(stem)
    return stem if match is None else match[1]


def fetch(model: str, revision: str | None, load_format: str, *, code: bool = False) -> Path:
    """The GGUF file or the local snapshot of a hub's model, downloaded where the cache lacks it. Never fetches pickles.

    Args:
        model: a repository, of whose GGUF files a label after a colon names one.
        load_format: dummy: fetch no weights; gguf: fetch a GGUF file, whatever else there is.
        code: fetch Python files too.

    Raises:
        ConfigError: the hub has no such model, revision or file, or cannot be reached and the cache lacks the model.
    """
    repo_id, label = split_name(model)
    with _reported(repo_id, revision):
        from huggingface_hub import hf_hub_download, snapshot_download

        snapshot = None
        if label is None and load_format != "gguf":
            weights = load_format != "dummy"
            patterns = _DESCRIPTION + (["*.safetensors"] if weights else []) + (["*.py"] if code else [])
            found = snapshot_download(repo_id, revision=revision, allow_patterns=patterns, ignore_patterns=_SECOND_COPIES)
            if (Path(found) / "modules.json").exists():
                snapshot_download(repo_id, revision=revision, allow_patterns=_MODULES)
            snapshot = Path(found)
            if any(snapshot.glob("*.safetensors" if weights else "config.json")):
                return snapshot
        sizes = _gguf_sizes(repo_id, revision)
        if snapshot is not None and not sizes:
            return snapshot
        return Path(hf_hub_download(repo_id, choose_gguf(repo_id, label, sizes), revision=revision))


def _gguf_sizes(repo_id: str, revision: str | None) -> dict[str, int]:
    """Path -> bytes of the GGUF files of a repository, or, where the hub cannot be reached, of those in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        # Not list_repo_tree, which tries again for half a minute where the hub cannot be reached.
        files = HfApi().model_info(repo_id, revision=revision, files_metadata=True).siblings or []
        return {file.rfilename: file.size or 0 for file in files if file.rfilename.endswith(".gguf")}
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except _transport_errors():
        snapshot = Path(snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=[]))
        return {str(file.relative_to(snapshot)): file.stat().st_size for file in snapshot.rglob("*.gguf")}


@contextlib.contextmanager
def _reported(repo_id: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub's client as ConfigErrors."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    name = repo_id if revision is None else f"{repo_id} (revision {revision})"
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(f"the hub wants you to accept the terms of {name}, and to log in: hf auth login", "model") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub's {repo_id} has no revision {revision!r}", "revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"the hub has no model {repo_id} that it shows you, and there is no such file or directory here", "model"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{repo_id} is neither a file, a directory nor a hub id: {error}", "model") from error
    except _transport_errors() as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ConfigError(
            f"offline: {offline}, and the local cache does not have {name}. If you have the model's files, pass their "
            "directory (or GGUF file) in place of the id",
            "model",
        ) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """OSError, and the error of the HTTP library, which differs between versions of the hub's client."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
