"""An engine over a tiny model whose requests hold constraints of every kind."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import msgspec
import pytest

from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.constraints import Constraints
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.request import Request
from headrace.core.scheduler import Scheduler
from headrace.engine.core import EngineCore
from headrace.engine.executor import LocalExecutor
from headrace.engine.outputs import OutputProcessor
from headrace.option_groups import StructuredOutputsConfig
from headrace.outputs import OutputDelta
from headrace.parallel.agreement import OneProcess
from headrace.runner.runner import ModelRunner
from headrace.sampling_params import StructuredOutputsParams
from support.byte_tokenizer import ByteTokenizer
from support.runner.harness import EOS, VOCAB, World, prompt, request

PIECES = [b"<pad>", b"<eos>", b"<sep>", *(bytes([byte]) for byte in range(32, 127)), b"\n"]
PIECES += [b'{"', b'":', b'": ', b'",', b", ", b'"}', b"}}", b"name", b"true", b"10", b"ab", b"  "]
OPEN, CLOSE = len(PIECES), len(PIECES) + 1
PIECES += [b"<think>", b"</think>"]
PIECES += [b""] * (VOCAB - 10 - len(PIECES))
"""What JSON is written with. Ids beyond are of the model alone."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}, "tag": {"enum": ["a", "b", None]}},
    "required": ["name", "tag"],
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json": SCHEMA},
    "regex": {"regex": "[a-c]{2,8}-[0-9]{1,3}"},
    "choice": {"choice": ["yes", "no", "maybe so"]},
    "grammar": {"grammar": 'root ::= "(" item ("," item){0,3} ")"\nitem ::= [a-z]{1,3} | root\n'},
}


@functools.lru_cache(maxsize=1)
def grammars(name: str = "letters") -> tuple[GrammarFactory, GrammarVocabulary]:
    vocabulary = GrammarVocabulary(ByteTokenizer(PIECES, (0, EOS, 2)), VOCAB, {OPEN, CLOSE})
    return GrammarFactory(StructuredOutputsConfig(), vocabulary), vocabulary


def valid(name: str, text: bytes) -> bool:
    if name == "schema":
        found = json.loads(text)
        jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install 'headrace[dev]'")
        jsonschema.validate(found, SCHEMA)
        return True
    if name == "grammar":
        inner = text.decode()
        while (shorter := re.sub(r"\((?:[a-z]{1,3})(?:,[a-z]{1,3}){0,3}\)", "a", inner)) != inner:
            inner = shorter
        return inner == "a"
    pattern = CONSTRAINTS["regex"]["regex"] if name == "regex" else "yes|no|maybe so"
    return re.fullmatch(pattern, text.decode()) is not None


def constrained(name: str, index: int = 0, **sampling: Any) -> Request:
    """A request named ``KIND index``."""
    options = {"temperature": 1.0, "max_tokens": 48} | sampling
    made = request(f"{name} {index}", prompt(index + 1, 5 + 3 * index), seed=index, **options)
    return msgspec.structs.replace(made, constraint=grammars("letters")[0].constraint(params(name)))


def params(name: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(**CONSTRAINTS[name])


class Engine:
    """A core over the tiny model, and what every sample came to."""

    def __init__(self, world: World, compiler: GrammarCompiler | None = None) -> None:
        config = world.config()
        self.runner: ModelRunner = world.runner()
        scheduler = Scheduler(config.scheduler, config.cache)
        compiler = compiler or GrammarCompiler(grammars("letters")[1], StructuredOutputsConfig())
        self.constraints = Constraints(compiler, VOCAB)
        executor = LocalExecutor(self.runner._model, self.runner, OneProcess())
        self.core = EngineCore(scheduler, executor, OutputProcessor(None), self.constraints, pipeline_depth=world.depth)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finish: dict[tuple[str, int], str] = {}
        self.errors: dict[tuple[str, int], str | None] = {}
        self.codes: dict[tuple[str, int], str | None] = {}
        self.stops: dict[tuple[str, int], int | str | None] = {}

    def add(self, *requests: Request) -> None:
        for each in requests:
            self.core.add(each)

    def compile(self, *requests: Request) -> None:
        """Compiles their constraints, so that the schedule does not depend on the time that this takes."""
        for each in requests:
            if each.constraint is not None:
                wait([self.constraints._compiler.compile(each.constraint)[0]])

    def take(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            key = delta.request_id, delta.index
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.finish[key], self.errors[key] = delta.finish_reason, delta.error
                self.codes[key], self.stops[key] = delta.error_code, delta.stop_reason

    def run(self, before_step: Callable[[int], None] = lambda step: None) -> Engine:
        for step in range(4000):
            before_step(step)
            if not self.core.has_work():
                break
            self.take(self.core.step())
        assert not self.core.has_work()
        self.core.scheduler.check_integrity()
        return self

    def text(self, key: tuple[str, int]) -> bytes:
        return b"".join(PIECES[token] for token in self.tokens[key] if token != EOS)

    def assert_valid(self) -> None:
        """What ended is valid; what was cut off is the beginning of something valid."""
        for key, reason in self.finish.items():
            name = key[0].split()[0]
            if name not in CONSTRAINTS or reason == "abort":
                continue
            assert reason in ("stop", "length"), (key, self.errors[key])
            if reason == "stop":
                assert valid(name, self.text(key)), (key, self.text(key))
            else:
                made = grammars("letters")[0].constraint(params(name))
                state = self.constraints._compiler.compile(made)[0].result().with_ends([])
                assert state.advance(self.tokens[key]) is None
