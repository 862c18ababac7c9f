"""FastTokenizer: a tokenizer of the tokenizers library with its special tokens and chat templates."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

import headrace
from headrace.errors import ConfigError
from headrace.sources.fields import typed
from headrace.sources.user_cache import cache_directory, keep

_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
_VOCABULARIES = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Names of the files that hold vocabularies, of which a tokenizer has one at least."""
_MAX_BYTES = 64 * 2**20
"""Largest file that is hashed: no tokenizer file is as large."""


@dataclasses.dataclass
class FastTokenizer:
    """The part of transformers' PreTrainedTokenizerFast that headrace uses."""

    backend_tokenizer: Backend
    special_tokens_map: dict[str, str]
    """``bos_token``, ``eos_token``, ... -> the token's text; templates may use them by name."""
    chat_template: str | dict[str, str] | None = None
    response_template: dict[str, Any] | None = None
    """The checkpoint's declaration of how to read its answers."""

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        token_id: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return token_id


def _refuse_none(folder: Path) -> None:
    """Refuses a folder without a tokenizer: for some models transformers makes one of no tokens then."""
    if not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        raise ConfigError(
            f"{folder} has no tokenizer: name another (tokenizer), or take token ids alone (skip_tokenizer_init)", "tokenizer"
        )


def from_directory(folder: Path) -> FastTokenizer:
    """Loads the tokenizer that transformers builds from a directory's files.

    transformers' tokenizer classes take seconds to import and modify ``tokenizer.json``, so the result for the same files is
    cached in the user's cache directory.

    Raises: as ``from_transformers``; ConfigError: the directory has none.
    """
    _refuse_none(folder)
    file = cache_directory() / f"tokenizer-{_fingerprint(folder)}.json"
    try:
        cached = json.loads(file.read_text(encoding="utf-8"))
        return FastTokenizer(
            Backend.from_str(cached["backend"]), cached["special_tokens"], cached["chat_template"], cached["response_template"]
        )
    except (OSError, ValueError, KeyError):
        tokenizer = from_transformers(str(folder), local=True, trusted=False)
    tokenizer.chat_template = _template_of_processor(folder) or tokenizer.chat_template
    facts = {
        "backend": tokenizer.backend_tokenizer.to_str(),
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": tokenizer.chat_template,
        "response_template": tokenizer.response_template,
    }
    keep(file, json.dumps(facts))
    return tokenizer


def _template_of_processor(folder: Path) -> str | None:
    """The chat template of an older multimodal checkpoint's processor, in a file that transformers' tokenizers do not read.

    Raises:
        ConfigError: the file has none.
    """
    file = folder / "chat_template.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} has no chat template: {error}", "tokenizer") from error
    return str(typed(found, str, file, "chat_template"))


def _fingerprint(folder: Path) -> str:
    """Hash of every file that can affect the tokenizer, and of the versions of the libraries that build it."""
    digest = hashlib.sha256()
    for package in ("transformers", "tokenizers"):
        digest.update(importlib.metadata.version(package).encode() + b"\0")
    digest.update(headrace.__version__.encode() + b"\0")
    for file in sorted({file for pattern in _FILES for file in folder.glob(pattern)}):
        if file.is_file() and file.stat().st_size <= _MAX_BYTES and not file.name.endswith(".index.json"):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def from_transformers(name: str, *, local: bool, trusted: bool) -> FastTokenizer:
    """Loads a tokenizer with transformers from a directory or hub id. ``trusted``: code that comes with it may run.

    Raises:
        ConfigError: it cannot be loaded, is not a fast tokenizer, or has a chat template that is not text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        hf: Any = AutoTokenizer.from_pretrained(name, use_fast=True, trust_remote_code=trusted, local_files_only=local)
    except Exception as error:
        # Missing, corrupt and unknown files surface as errors of several libraries.
        raise ConfigError(f"the tokenizer of {name} cannot be loaded: {error}", "tokenizer") from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise ConfigError(f"the tokenizer of {name} is a {type(hf).__name__}: one with a tokenizer.json is needed", "tokenizer")
    templates = typed(hf.chat_template, str | dict[str, str] | None, Path(name, "tokenizer_config.json"), "chat_template")
    response = getattr(hf, "response_template", None)
    return FastTokenizer(
        hf.backend_tokenizer, dict(hf.special_tokens_map), templates, response if isinstance(response, dict) else None
    )
