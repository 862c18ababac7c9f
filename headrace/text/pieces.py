"""The bytes of every token of a vocabulary, read off the tokenizer's decoder."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tokenizers import Tokenizer as Backend

from headrace.errors import ConfigError
from headrace.text.vocab import TokenBytes


@dataclasses.dataclass(frozen=True)
class DecoderRules:
    """Changes that a tokenizer's decoder makes to a token's characters."""

    byte_level: bool = False
    """Every character stands for a byte (GPT-2's table)."""
    byte_fallback: bool = False
    """``<0x0A>`` is the byte 10."""
    replace: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    """Spaces taken off the very start of a text, at most."""


def decoder_rules(backend: Backend) -> DecoderRules:
    """Reads a tokenizer's decoder.

    Raises:
        ConfigError: it does something that has no meaning token by token.
    """
    if backend.decoder is None:
        return DecoderRules()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    rules = DecoderRules()
    for step in steps:
        rules = _with_step(rules, step)
    return rules


def _with_step(rules: DecoderRules, step: dict[str, Any]) -> DecoderRules:
    kind = step["type"]
    if kind == "ByteLevel":
        return dataclasses.replace(rules, byte_level=True)
    if kind == "ByteFallback":
        return dataclasses.replace(rules, byte_fallback=True)
    if kind == "Replace" and "String" in step["pattern"]:
        return dataclasses.replace(rules, replace=(*rules.replace, (step["pattern"]["String"], step["content"])))
    if kind == "Metaspace":
        strip = 0 if step["prepend_scheme"] == "never" else 1
        return dataclasses.replace(rules, replace=(*rules.replace, (step["replacement"], " ")), strip=strip)
    if kind == "Strip" and step["content"] == " " and step["stop"] == 0:
        return dataclasses.replace(rules, strip=step["start"])
    if kind == "Fuse":
        return rules
    raise ConfigError(f"the tokenizer's decoder has a step {kind!r} that is not supported: {step}", "tokenizer")


def token_bytes(backend: Backend, rules: DecoderRules, vocab_size: int) -> TokenBytes:
    """The bytes of tokens ``0 .. vocab_size - 1``."""
    names = [""] * vocab_size
    for name, token in backend.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            names[token] = name
    pieces = _byte_level(names) if rules.byte_level else _plain(names, rules)
    added = backend.get_added_tokens_decoder()
    return TokenBytes(pieces, frozenset(token for token, entry in added.items() if entry.special and token < vocab_size))


def _gpt2_table() -> dict[int, int]:
    """Code point -> byte of GPT-2's byte-level alphabet; code points below 256 that are not in it go where latin-1 ends.

    Bytes that print stand for themselves, the others are shifted past 255 in order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printing)]
    outside = dict.fromkeys(rest, 0xFFFF)
    return outside | {byte: byte for byte in printing} | {256 + i: byte for i, byte in enumerate(rest)}


_GPT2_TABLE = _gpt2_table()


def _byte_level(names: list[str]) -> list[bytes]:
    """Every character a byte. A token with a character outside the table (an added token) is its own UTF-8."""
    pieces = []
    for name in names:
        try:
            pieces.append(name.translate(_GPT2_TABLE).encode("latin-1"))
        except UnicodeEncodeError:
            pieces.append(name.encode())
    return pieces


def _plain(names: list[str], rules: DecoderRules) -> list[bytes]:
    pieces = []
    for name in names:
        if rules.byte_fallback and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                pieces.append(bytes([int(name[3:5], 16)]))
                continue
            except ValueError:
                pass  # not hexadecimal after all: a token like any other
        for old, new in rules.replace:
            name = name.replace(old, new)
        pieces.append(name.encode())
    return pieces
