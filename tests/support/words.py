"""A vocabulary of bytes, some words and special tokens, and matchers over it."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np

from headrace.constrain.checker import ConstraintChecker
from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.matcher import GrammarMatcher
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams
from support.byte_tokenizer import ByteTokenizer

EOS, OTHER_SPECIAL = 256, 257
WORDS = [b'{"', b'": ', b'",', b", ", b"true", b"}}", b"abc", b"12", b"\n  ", b"</think>", b"</s>", "é".encode()]
PIECES = [*(bytes([value]) for value in range(256)), b"<|im_end|>", b"<s>", *WORDS, b"", b""]
"""The last two ids are of the model alone."""
VOCAB = len(PIECES)


def tokenizer() -> ByteTokenizer:
    return ByteTokenizer(PIECES, (EOS, OTHER_SPECIAL))


@functools.lru_cache(maxsize=1)
def shared(name: str = "words") -> tuple[ConstraintChecker, GrammarCompiler]:
    config = StructuredOutputsConfig()
    vocabulary = GrammarVocabulary(tokenizer(), VOCAB)
    return ConstraintChecker(config, vocabulary), GrammarCompiler(vocabulary, config)


def matcher(ends: tuple[int, ...] = (EOS,), **constraint: Any) -> GrammarMatcher:
    checker, compiler = shared("words")
    made = compiler.compile(checker.constraint(StructuredOutputsParams(**constraint)))[0].result()
    assert not isinstance(made, str), made
    return made.with_ends(ends)


def accepts(constraint: GrammarMatcher, text: str) -> bool:
    probe = constraint.copy()
    return probe.advance(list(text.encode())) is None and probe.accepting


def allowed(constraint: GrammarMatcher) -> set[int]:
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    error = constraint.fill(mask)
    assert error is None, error
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def walk(constraint: GrammarMatcher, seed: int, steps: int = 400) -> tuple[bytes, bool]:
    """Random allowed tokens, biased to what closes. The text, and whether it is complete."""
    chance, state, text = random.Random(seed), constraint.copy(), b""
    for step in range(steps):
        tokens = sorted(allowed(state))
        assert tokens, "no token is allowed, and the matcher has not ended"
        closing = [token for token in tokens if PIECES[token][:1] in (b'"', b"}", b"]", b",") or token == EOS]
        readable = [token for token in tokens if token == EOS or PIECES[token].isascii()]
        pool = closing if closing and chance.random() < min(0.9, 0.1 + step / 60) else readable or tokens
        token = chance.choice(pool)
        if token == EOS:
            assert state.accepting
            return text, True
        assert state.advance([token]) is None
        text += PIECES[token]
        if state.ended:
            assert state.accepting and allowed(state) == {EOS}
            return text, True
    return text, False
