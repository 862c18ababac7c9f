"""Models in the cache of the Hugging Face hub: which there are, and their removal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.errors import ConfigError, did_you_mean
from headrace.sources.hub import choose_gguf, gguf_names, split_name

if TYPE_CHECKING:
    from huggingface_hub import CachedFileInfo, CachedRepoInfo, CachedRevisionInfo, HFCacheInfo


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A repository's weights in safetensors, or one of its GGUF files."""

    name: str
    """Name of the model on a command line."""
    format: Literal["safetensors", "gguf", "none"]
    """none: the weights are not there."""
    revision: str
    """The commit."""
    path: Path
    """The snapshot's folder or the GGUF file."""
    size: int
    """Bytes on disk, those of older revisions included."""
    last_used: float
    """Seconds since the epoch, as far as the file system keeps the time of the last access."""


def cached_models() -> list[CachedModel]:
    """All models in the cache, last used first."""
    found = [model for repo in _repos(_scan()) for model in _models(repo)]
    return sorted(found, key=lambda model: (-model.last_used, model.name))


def model_at(path: Path) -> CachedModel:
    """The model of a GGUF file or of a snapshot's folder in the cache."""
    path = path.parent.resolve() / path.name  # The scan resolves the cache's own path.
    repo = next(repo for repo in _repos(_scan()) if path.is_relative_to(repo.repo_path))
    revision = next(revision for revision in repo.revisions if path.is_relative_to(revision.snapshot_path))
    found = list(_models(dataclasses.replace(repo, revisions=frozenset([revision]))))
    return next(model for model in found if model.path == path or model.format != "gguf")


def remove(name: str) -> int:
    """Removes a repository, or one of its GGUF files, from the cache. Returns the number of bytes that are freed.

    Raises:
        ConfigError: the cache has no such model.
    """
    cache = _scan()
    repo_id, label = split_name(name)
    repo = next((repo for repo in _repos(cache) if repo.repo_id == repo_id), None)
    if cache is None or repo is None:
        known = [model.name for model in cached_models()]
        raise ConfigError(f"the hub's cache has no model {name}{did_you_mean(name, known)}", "MODEL")
    # Not by commits: those of a copied repository are the same.
    nothing = cache.delete_revisions()
    strategy = dataclasses.replace(nothing, repos=frozenset([repo.repo_path]), expected_freed_size=repo.size_on_disk)
    if label is not None:
        files = _gguf_files(repo)
        chosen = choose_gguf(repo_id, label, {place: _size(copies) for place, copies in files.items()})
        gone, all_files = files[chosen], [file for revision in repo.revisions for file in revision.files]
        kept = [file for file in all_files if file not in gone]
        if any(file.file_path.suffix in (".gguf", ".safetensors") for file in kept):
            blobs = frozenset(file.blob_path for file in gone) - {file.blob_path for file in kept}
            strategy = dataclasses.replace(
                nothing,
                blobs=blobs,
                snapshots=frozenset(file.file_path for file in gone),
                expected_freed_size=_size(file for file in gone if file.blob_path in blobs),
            )
    strategy.execute()
    return strategy.expected_freed_size


def _scan() -> HFCacheInfo | None:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None


def _repos(cache: HFCacheInfo | None) -> Iterator[CachedRepoInfo]:
    return (repo for repo in (cache.repos if cache is not None else ()) if repo.repo_type == "model" and repo.revisions)


def _models(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    revision = _current(repo)
    files, rest = _gguf_files(repo), repo.size_on_disk
    sizes = {place: _size(copies) for place, copies in files.items()}
    for place, name in gguf_names(sizes).items():
        rest -= sizes[place]
        copies = files[place]
        path = next(
            (file.file_path for file in copies if file.file_path == revision.snapshot_path / place), copies[0].file_path
        )
        used = max(file.blob_last_accessed for file in copies)
        yield CachedModel(f"{repo.repo_id}:{name}", "gguf", revision.commit_hash, path, sizes[place], used)
    stored = any(file.file_path.suffix == ".safetensors" for file in revision.files)
    if stored or not files:
        kind: Literal["safetensors", "none"] = "safetensors" if stored else "none"
        yield CachedModel(repo.repo_id, kind, revision.commit_hash, revision.snapshot_path, rest, repo.last_accessed)


def _current(repo: CachedRepoInfo) -> CachedRevisionInfo:
    """The revision that a name without a revision means, as far as the cache knows; else the newest."""
    return max(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))


def _gguf_files(repo: CachedRepoInfo) -> dict[str, list[CachedFileInfo]]:
    """The GGUF files by their path in the repository, each with its copies in all revisions."""
    found: dict[str, list[CachedFileInfo]] = {}
    for revision in repo.revisions:
        for file in revision.files:
            if file.file_path.suffix == ".gguf":
                found.setdefault(file.file_path.relative_to(revision.snapshot_path).as_posix(), []).append(file)
    return found


def _size(copies: Iterable[CachedFileInfo]) -> int:
    return sum({file.blob_path: file.size_on_disk for file in copies}.values())
