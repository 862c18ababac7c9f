"""Tokenizers built from GGUF metadata encode as the tokenizers they stand for."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from support import vocabularies
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.errors import ConfigError
from headrace.sources.gguf import read_metadata
from headrace.text.gguf_vocab import build_tokenizer
from headrace.text.tokenizer import Tokenizer


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Mixtures of letters, digits, blanks and scripts, where word rules differ."""
    rng = random.Random(seed)
    alphabet = "abcXYZ 0123456789 \n\r\t'sS'LLre.,!?-_=+(){}é\u0301ßñ½²中文字日本ひカ한국😀\u200d\u00a0\u3000म्"
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(count)]


def test_embedded_model_splits_digits(embedded: Tokenizer) -> None:
    assert embedded.encode("a  12") == [81, 256, 33, 34]
    assert embedded.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert embedded.eos_token_ids == [2]


def test_embedded_model_cuts_words_as_its_own_tokenizer(embedded: Tokenizer) -> None:
    backend = Backend.from_str(embedded.hf.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    for text in vocabularies.PROBES + random_texts(500):
        assert embedded.encode(text) == backend.encode(text).ids, text


def rebuilt(path: Path, state: dict[str, Any], pre: str, **fields: Any) -> Tokenizer:
    return Tokenizer(build_tokenizer(read_metadata(vocabularies.gguf_of_state(path, state, pre, **fields))))


# The patterns of the original tokenizers' files.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS, BLANKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS
QWEN2 = WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + BLANKS


@pytest.mark.parametrize(("pre", "pattern"), [("gpt-2", GPT2), ("llama-bpe", LLAMA3), ("qwen2", QWEN2)])
def test_word_rules(tmp_path: Path, pre: str, pattern: str) -> None:
    """The rule of ``tokenizer.ggml.pre`` decides; the vocabulary is the same small one for all."""
    backend = vocabularies.train_byte_level()
    state = json.loads(backend.to_str())
    tokenizer = rebuilt(tmp_path / "model.gguf", state, pre)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    composed = pre == "qwen2"
    for text in vocabularies.PROBES + random_texts(200):
        plain = tokenizer.hf.backend_tokenizer.normalizer.normalize_str(text) if composed else text
        assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(plain).ids, text


def words(tmp_path: Path, pre: str, text: str) -> list[str]:
    """Returns the words into which the rule cuts a text."""
    state = json.loads(vocabularies.train_byte_level().to_str())
    backend = rebuilt(tmp_path / "model.gguf", state, pre).hf.backend_tokenizer
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world\n\n  two", ["Hello", " world", "\n", "\n", " ", " two"]),
        ("it's, well -- done!", ["it", "'", "s", ",", " well", " --", " done", "!"]),
        ("x = 2024½;", ["x", " =", " ", "2", "0", "2", "4", "½", ";"]),
        ("end   ", ["end", "   "]),
        ("日本語、ok。ひらがな", ["日本語", "、", "ok", "。", "ひらがな"]),
        ("Привет Ωμέγα élan", ["Привет", " Ωμέγα", " é", "lan"]),
        ("naʕʔp ǅƻǀ", ["na", "ʕ", "ʔ", "p", " ǅ", "ƻǀ"]),  # noqa: RUF001
        ("Աա 𝐀b 𞤀𞥃", ["Ա", "ա 𝐀", "b", " 𞤀𞥃"]),  # noqa: RUF001
    ],
)
def test_the_rule_of_deepseek_llm(tmp_path: Path, text: str, expected: list[str]) -> None:
    """Cased letters of some scripts are words, with a blank before them; what no expression names stays together.

    The signs' range from : to ~ has Latin letters in it, so these part from accented ones: as in the original.
    """
    assert words(tmp_path, "deepseek-llm", text) == expected


@pytest.mark.parametrize(("fixture", "pre"), [("qwen3_files", "qwen2"), ("deepseek_files", "deepseek-v3")])
def test_real_vocabularies_survive_the_way_through_gguf(
    tmp_path: Path, request: pytest.FixtureRequest, fixture: str, pre: str
) -> None:
    files: Path = request.getfixturevalue(fixture)
    original = Backend.from_file(str(files / "tokenizer.json"))
    state = json.loads((files / "tokenizer.json").read_text())
    tokenizer = rebuilt(tmp_path / "model.gguf", state, pre)
    special = [entry["content"] for entry in state["added_tokens"][:20]]
    texts = vocabularies.PROBES + random_texts(1500) + [f"a{token}b {token}" for token in special]
    for text in texts:
        expected = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == original.decode(expected), text
    assert tokenizer.token_bytes.special == {entry["id"] for entry in state["added_tokens"] if entry["special"]}


def test_bos_as_the_file_says_or_the_rule_implies(tmp_path: Path) -> None:
    state = json.loads(vocabularies.train_byte_level().to_str())
    bos = {"tokenizer.ggml.bos_token_id": 1}
    said = rebuilt(tmp_path / "a.gguf", state, "llama-bpe", **bos, **{"tokenizer.ggml.add_bos_token": False})
    implied = rebuilt(tmp_path / "b.gguf", state, "llama-bpe", **bos)
    other = rebuilt(tmp_path / "c.gguf", state, "gpt-2", **bos)
    both = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 0}
    around = rebuilt(tmp_path / "d.gguf", state, "gpt-2", **bos, **both)
    plain = other.encode("the cat")
    assert said.encode("the cat") == plain
    assert implied.encode("the cat") == [1, *plain]
    assert implied.encode("the cat", add_special_tokens=False) == plain
    assert around.encode("the cat") == [1, *plain, 0]


def test_padding_tokens_are_no_text(tmp_path: Path) -> None:
    state = json.loads(vocabularies.train_byte_level().to_str())
    state["added_tokens"].append({"id": 500, "content": "<tool>", "special": False})
    tokenizer = rebuilt(tmp_path / "model.gguf", state, "gpt-2")
    assert tokenizer.encode("a<tool>b")[1] == 500
    assert tokenizer.id_to_token(499) is None
    assert Tokenizer(tokenizer.hf, vocab_size=600).token_bytes.pieces[499] == b""


def spm_encode(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece BPE, word for word: merge the best-scored neighbours, leftmost first; fall back to bytes."""
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not joined:
            break
        place = -max(joined)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    out = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return out


def test_sentencepiece_encodes_as_its_algorithm(sentencepiece: Tokenizer) -> None:
    tokens, scores, _ = vocabularies.sentencepiece_vocabulary()
    for text in vocabularies.PROBES + random_texts(200) + vocabularies.CORPUS[:7]:
        assert sentencepiece.encode(text, add_special_tokens=False) == spm_encode(text, tokens, scores), text
    assert sentencepiece.encode("the cat")[0] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.pre": "never-heard-of"}, "never-heard-of"),
        ({"tokenizer.ggml.model": "t5"}, "t5"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "do not fit together"),
        ({"tokenizer.ggml.bos_token_id": 999_999}, "bos_token_id"),
    ],
)
def test_unknown_or_broken_tokenizers_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    state = json.loads(vocabularies.train_byte_level().to_str())
    with pytest.raises(ConfigError, match=message):
        rebuilt(tmp_path / "model.gguf", state, "gpt-2", **fields)


def test_vocabulary_faults_are_refused(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["a b"]}
    twice = vocabularies.write_gguf(tmp_path / "a.gguf", tokens=["a", "b", "a"], types=[1, 1, 1], fields=fields)
    with pytest.raises(ConfigError, match="same text"):
        build_tokenizer(read_metadata(twice))
    short = vocabularies.write_gguf(tmp_path / "b.gguf", tokens=["a", "b", "ab"], types=[1, 1], fields=fields)
    with pytest.raises(ConfigError, match="token types"):
        build_tokenizer(read_metadata(short))
    nothing = vocabularies.write_gguf(tmp_path / "c.gguf", tokens=["a"], types=[1], fields={"tokenizer.ggml.model": "gpt2"})
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges"):
        build_tokenizer(read_metadata(nothing))


def test_named_chat_templates(tmp_path: Path) -> None:
    state = json.loads(vocabularies.train_byte_level().to_str())
    fields = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "with tools",
    }
    tokenizer = rebuilt(tmp_path / "model.gguf", state, "gpt-2", **fields)
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.render_chat(messages) == "plain"
    assert tokenizer.render_chat(messages, tools=[tool]) == "with tools"
