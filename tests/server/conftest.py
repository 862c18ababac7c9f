"""Fixtures: an in-memory API over the fake engine, and a server on a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.server.fakes import FakeLLM
from support.server.harness import Api, Running, running
from support.server.scripted import made, scripts
from support.tokenizers import byte_level, deepseek, deepseek_files, embedded, qwen3, qwen3_files, sentencepiece, tokenizer

__all__ = ["byte_level", "deepseek", "deepseek_files", "embedded", "made"]
__all__ += ["qwen3", "qwen3_files", "scripts", "sentencepiece", "tokenizer"]


@pytest.fixture(autouse=True)
def _no_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)


@pytest.fixture
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture
def api(llm: FakeLLM) -> Api:
    return Api(llm)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    os.environ.pop("HEADRACE_API_KEY", None)
    with running(FakeLLM()) as started:
        yield started
