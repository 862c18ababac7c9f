"""Tokenizers without transformers are the ones that transformers makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import vocabularies
from tokenizers import Tokenizer as Backend
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from headrace.errors import ConfigError
from headrace.sources.user_cache import cache_directory
from headrace.text import fast_tokenizer
from headrace.text.fast_tokenizer import FastTokenizer, from_directory, from_transformers
from headrace.text.gguf_vocab import add_bos_and_eos
from headrace.text.tokenizer import Tokenizer

TEXTS = ("Hello, world", "  two  spaces\n\n", "naïve café 日本語 🙂", "<|user|>x<|end|>", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hf = vocabularies.byte_level()
    hf.add_special_tokens({"bos_token": "<|user|>", "eos_token": "<|end|>"})
    hf.chat_template = "{{ messages }}"
    hf.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def same(one: FastTokenizer, other: FastTokenizer) -> None:
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert (one.special_tokens_map, one.chat_template) == (other.special_tokens_map, other.chat_template)
    assert (one.bos_token_id, one.eos_token_id, len(one)) == (other.bos_token_id, other.eos_token_id, len(other))


def test_the_second_start_reads_what_the_first_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = from_transformers(str(folder), local=True, trusted=False)
    same(from_directory(folder), wanted)
    monkeypatch.setattr(fast_tokenizer, "from_transformers", None)
    again = from_directory(folder)
    same(again, wanted)
    for text in TEXTS:
        assert Tokenizer(again).encode(text) == wanted.backend_tokenizer.encode(text).ids


def test_another_file_is_another_tokenizer(folder: Path) -> None:
    from_directory(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(described | {"chat_template": "changed"}))
    assert from_directory(folder).chat_template == "changed"


def test_the_template_of_an_older_processor_is_read(folder: Path) -> None:
    """Multimodal checkpoints of 2024 have it in a file of its own; transformers' processors prefer it to all others."""
    file = folder / "chat_template.json"
    file.write_text(json.dumps({"chat_template": "with pictures"}))
    assert [from_directory(folder).chat_template for _ in range(2)] == ["with pictures"] * 2
    for wrong in ("{", "[]", "{}", '{"chat_template": 3}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=r"chat_template\.json"):
            from_directory(folder)


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig, GPT2Config])
def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path, kind: type[PreTrainedConfig]) -> None:
    """transformers makes one that gives no tokens for some of them."""
    kind().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no tokenizer: name another \(tokenizer\)"):
        from_directory(tmp_path)


@pytest.mark.parametrize("wrong", [5, True, {"default": 5}, [{"name": "default", "template": 5}]])
def test_a_template_that_is_no_text_is_an_error(folder: Path, wrong: object) -> None:
    file = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": wrong}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template.* is .*: expected `"):
        from_directory(folder)


def test_a_cache_that_is_broken_or_cannot_be_written_is_done_without(folder: Path) -> None:
    wanted = from_directory(folder)
    (kept,) = cache_directory().glob("tokenizer-*.json")
    kept.write_text("{")
    same(from_directory(folder), wanted)
    shutil.rmtree(cache_directory())
    cache_directory().write_text("a file where the directory should be")
    same(from_directory(folder), wanted)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
def test_bos_and_eos_are_put_where_transformers_puts_them(bos: bool, eos: bool) -> None:
    hf: Any = vocabularies.byte_level()
    hf.add_special_tokens({"bos_token": "<|user|>", "eos_token": "<|end|>"})
    plain = Backend.from_str(hf.backend_tokenizer.to_str())
    tokenizer_class: Any = PreTrainedTokenizerFast
    theirs = tokenizer_class(
        tokenizer_object=plain, bos_token="<|user|>", eos_token="<|end|>", add_bos_token=bos, add_eos_token=eos
    )
    ours = Backend.from_str(hf.backend_tokenizer.to_str())
    add_bos_and_eos(ours, {"bos_token": "<|user|>", "eos_token": "<|end|>"}, bos=bos, eos=eos)
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.backend_tokenizer.encode(text).ids
