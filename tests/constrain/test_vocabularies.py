"""Constraints over every kind of tokenizer: what random allowed tokens spell is valid, and special tokens are never text."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from headrace.constrain.compiler import compiled
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling_params import StructuredOutputsParams
from headrace.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["é", "the cat", 1]}},
    },
    "required": ["name", "tags"],
}
MORE = 7
"""Ids that the model has beyond the tokenizer's."""


@pytest.mark.parametrize("kind", ["embedded", "byte_level", "sentencepiece"])
def test_random_outputs_are_valid(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    size = tokenizer.vocab_size + MORE
    vocabulary = GrammarVocabulary(tokenizer, size)
    config = StructuredOutputsConfig()
    constraint = GrammarFactory(config, vocabulary).constraint(StructuredOutputsParams(json=SCHEMA))
    start = compiled(constraint.grammar, vocabulary, config).with_ends(tokenizer.eos_token_ids)
    pieces, special = tokenizer.token_bytes.pieces, tokenizer.token_bytes.special
    complete = 0
    for seed in range(12):
        chance, state, tokens = random.Random(seed), start.copy(), []
        while not state.ended and len(tokens) < 120:
            mask = np.zeros(-(-size // 32), dtype=np.int32)
            assert state.fill(mask) is None
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            assert allowed and max(allowed) < tokenizer.vocab_size
            assert not special & set(allowed) - set(tokenizer.eos_token_ids)
            closing = [token for token in allowed if pieces[token][:1] in (b'"', b"}", b"]")]
            tokens.append(chance.choice(closing if closing and chance.random() < 0.5 else allowed))
            assert state.advance(tokens[-1:]) is None
        if state.ended:
            complete += 1
            found = json.loads(b"".join(pieces[token] for token in tokens))
            assert isinstance(found["name"], str) and len(found["name"]) <= 12
            assert all(tag in ("é", "the cat", 1) for tag in found["tags"])
    assert complete > 3


@pytest.mark.parametrize("kind", ["embedded", "byte_level", "sentencepiece"])
def test_the_tokenizer_s_own_spelling_is_taken(kind: str, request: pytest.FixtureRequest) -> None:
    """Token by token, as a model would write it after a prompt."""
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    vocabulary, config = GrammarVocabulary(tokenizer, tokenizer.vocab_size), StructuredOutputsConfig()
    constraint = GrammarFactory(config, vocabulary).constraint(StructuredOutputsParams(json=SCHEMA))
    state = compiled(constraint.grammar, vocabulary, config)
    text = '{"name": "the cat sat", "tags": ["the cat", 1]}'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = tokenizer.token_bytes.pieces
    if pieces[tokens[0]].startswith(b" "):  # The blank that SentencePiece puts before a whole text, which an answer is not.
        assert state.copy().advance(tokens[:1]) is not None
        tokens = [*([] if pieces[tokens[0]] == b" " else [pieces.index(pieces[tokens[0]][1:])]), *tokens[1:]]
    assert state.advance(tokens) is None and state.ended
