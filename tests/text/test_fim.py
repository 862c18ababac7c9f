"""Prompts for filling in the middle: token sequences as the models' authors publish them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import vocabularies
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from headrace.sources.gguf import read_metadata
from headrace.text.fast_tokenizer import FastTokenizer
from headrace.text.fim import FORMATS, FillInTheMiddle, find_fim
from headrace.text.gguf_vocab import build_tokenizer
from headrace.text.tokenizer import Tokenizer

LETTERS = {letter: 100 + place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz ▁☺")}
A, B, C, SPACE, UNDERSCORE = (LETTERS[letter] for letter in "abc ▁")


def tokenizer_of(
    names: dict[str, int], bos: str | None = None, *, spaced: bool = False, vocab_size: int = 200_000
) -> Tokenizer:
    """Letters as tokens 100 to 128, and the named tokens; ``spaced``: with a space before every text, as SentencePiece has."""
    backend = Backend(models.BPE(vocab=LETTERS | names, merges=[]))
    if spaced:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, names[bos])])
    return Tokenizer(FastTokenizer(backend, {} if bos is None else {"bos_token": bos}), vocab_size=vocab_size)


def fim_of(tokenizer: Tokenizer) -> FillInTheMiddle:
    fim = find_fim(tokenizer)
    assert fim is not None
    return fim


def prompt(tokenizer: Tokenizer, prefix: str | list[int], suffix: str, *, bos: bool = True) -> list[int]:
    def encode(text: str, param: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, param=param)

    return fim_of(tokenizer).prompt(prefix, suffix, encode, add_special_tokens=bos)


QWEN = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<|fim_prefix|>": 151659, "<|fim_middle|>": 151660}
QWEN |= {"<|fim_suffix|>": 151661, "<|fim_pad|>": 151662, "<|repo_name|>": 151663, "<|file_sep|>": 151664}
STARCODER = {"<|endoftext|>": 0, "<fim_prefix>": 1, "<fim_middle>": 2, "<fim_suffix>": 3, "<fim_pad>": 4}
GEMMA = {"<bos>": 2, "<|fim_prefix|>": 67, "<|fim_middle|>": 68, "<|fim_suffix|>": 69, "<|file_separator|>": 70}
DEEPSEEK = {"<｜begin▁of▁sentence｜>": 32013, "<｜end▁of▁sentence｜>": 32014, "<｜fim▁hole｜>": 32015}
DEEPSEEK |= {"<｜fim▁begin｜>": 32016, "<｜fim▁end｜>": 32017}
LLAMA = {"<s>": 1, "</s>": 2, "▁<PRE>": 32007, "▁<SUF>": 32008, "▁<MID>": 32009, "▁<EOT>": 32010}
CODESTRAL = {"<s>": 1, "</s>": 2, "[PREFIX]": 11, "[MIDDLE]": 12, "[SUFFIX]": 13}


@pytest.mark.parametrize(
    ("names", "bos", "spaced", "tokens", "ends"),
    [
        (QWEN, None, False, [151659, A, 151661, B, C, 151660], {151643, *range(151659, 151665)}),
        (STARCODER, None, False, [1, A, 3, B, C, 2], {0, 1, 2, 3, 4}),
        (GEMMA, "<bos>", False, [2, 67, A, 69, B, C, 68], {67, 68, 69, 70}),
        (DEEPSEEK, "<｜begin▁of▁sentence｜>", False, [32013, 32016, A, 32015, B, C, 32017], {*range(32014, 32018)}),
        (LLAMA, "<s>", True, [1, 32007, UNDERSCORE, A, 32008, B, C, 32009], {*range(32007, 32011)}),
        (CODESTRAL, "<s>", True, [1, 13, B, C, 11, UNDERSCORE, A], {11, 13}),
    ],
    ids=["qwen", "starcoder", "codegemma", "deepseek", "codellama", "codestral"],
)
def test_sequences_are_the_published_ones(
    names: dict[str, int], bos: str | None, spaced: bool, tokens: list[int], ends: set[int]
) -> None:
    tokenizer = tokenizer_of(names, bos, spaced=spaced)
    assert prompt(tokenizer, "a", "bc") == tokens
    assert {*fim_of(tokenizer).end_token_ids} == ends
    without_bos = tokens[1:] if bos is not None else tokens
    assert prompt(tokenizer, "a", "bc", bos=False) == without_bos
    given = [token for token in without_bos if token != UNDERSCORE]
    assert prompt(tokenizer, [A], "bc") == given, "bos is not put before token ids"


def test_spaces_of_the_two_parts_are_kept() -> None:
    spaced = tokenizer_of(LLAMA, "<s>", spaced=True)
    assert prompt(spaced, "a ", " b") == [1, 32007, UNDERSCORE, A, UNDERSCORE, 32008, UNDERSCORE, B, 32009]
    assert prompt(tokenizer_of(STARCODER), " a ", " b ") == [1, SPACE, A, SPACE, 3, SPACE, B, SPACE, 2]


def test_no_tokens_no_format(embedded: Tokenizer, byte_level: Tokenizer) -> None:
    assert find_fim(embedded) is None
    assert find_fim(byte_level) is None
    assert find_fim(tokenizer_of({"<fim_prefix>": 1, "<fim_suffix>": 2})) is None
    assert find_fim(tokenizer_of(QWEN, vocab_size=151660)) is None, "tokens that the model lacks"
    for tokens in FORMATS:
        names = [name for name in (tokens.prefix, tokens.suffix, tokens.middle) if name is not None]
        assert find_fim(tokenizer_of({name: place for place, name in enumerate(names)})) is not None


@pytest.mark.parametrize("keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_tokens_that_a_gguf_file_names(tmp_path: Path, keys: tuple[str, ...]) -> None:
    tokens, scores, types = vocabularies.sentencepiece_vocabulary()
    named = ["<before>", "<after>", "<hole>", "<pad>"]
    first = len(tokens)
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [*scores, 0.0, 0.0, 0.0, 0.0]}
    fields |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    fields |= {f"tokenizer.ggml.{key}_token_id": first + place for place, key in enumerate(keys)}
    fields |= {"tokenizer.ggml.fim_pad_token_id": first + 3}
    path = vocabularies.write_gguf(tmp_path / "m.gguf", tokens=tokens + named, types=types + [3] * 4, fields=fields)
    tokenizer = Tokenizer(build_tokenizer(read_metadata(path)))
    inner = tokenizer.encode(" the", add_special_tokens=False)
    assert tokenizer.decode(inner) == " the"
    wheel = tokenizer.encode("mill", add_special_tokens=False)
    found = prompt(tokenizer, "mill", "wheel")
    assert found[: len(wheel) + 3] == [1, first, *wheel, first + 1]
    assert found[-1] == first + 2
    after = b"".join(tokenizer.token_bytes.pieces[token] for token in found[len(wheel) + 3 : -1])
    assert after == b"wheel", "no space before it"
    assert fim_of(tokenizer).end_token_ids == [first, first + 1, first + 2, first + 3]
