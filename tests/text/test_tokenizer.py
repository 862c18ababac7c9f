"""The bytes of tokens, decoding, and the tokenizer's errors."""

from __future__ import annotations

import pickle
import random
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import vocabularies
from support.tokenizers import PanicException
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from headrace.errors import ConfigError, RequestError
from headrace.sources.files import ModelFiles
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.text.vocab import TokenBytes

quick = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


def as_tokenized(tokenizer: Tokenizer, text: str) -> str:
    """What the tokenizer makes of a text before it cuts it: some compose characters."""
    name = type(tokenizer.hf.backend_tokenizer.normalizer).__name__
    return unicodedata.normalize("NFC", text) if name == "NFC" else text


def test_saved_truncation_and_padding_are_switched_off() -> None:
    hf = vocabularies.byte_level()
    text = "the cat sat on the mat " * 20
    whole = hf.backend_tokenizer.encode(text).ids
    hf.backend_tokenizer.enable_truncation(8)
    hf.backend_tokenizer.enable_padding(length=2048)
    assert Tokenizer(hf).encode(text) == whole


def longest_pause(work: Callable[[], object]) -> tuple[float, float]:
    """Longest time for which another thread did not run while ``work`` ran, and the time that ``work`` took."""
    longest, done = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not done.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return longest, seconds


def test_other_threads_run_while_a_text_is_tokenised() -> None:
    """Of several attempts one: on a busy machine other processes take the processor too."""
    tokenizer = Tokenizer(vocabularies.byte_level())
    text = "the mill wheel turns " * 20_000
    pauses = (longest_pause(lambda: tokenizer.encode(text)) for _ in range(5))
    assert any(longest < seconds / 2 for longest, seconds in pauses)


def test_more_tokens_than_allowed_are_refused() -> None:
    tokenizer = Tokenizer(vocabularies.byte_level())
    assert len(tokenizer.encode("x" * 9, max_tokens=9)) == 9
    with pytest.raises(RequestError) as error:
        tokenizer.encode("x" * 10, param="messages", max_tokens=9)
    assert (error.value.param, error.value.code) == ("messages", "context_length_exceeded")


@quick
@given(text=st.text(max_size=40))
def test_bytes_of_encoded_text_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    if any(token in text for token in ("<|", "<0x", "▁")) or not vocabularies.can_spell(tokenizer, text):
        return
    ids = tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes.pieces[token] for token in ids)
    assert tokenizer.strip_start(joined) == as_tokenized(tokenizer, text).encode()
    assert tokenizer.decode(ids) == as_tokenized(tokenizer, text)


@quick
@given(data=st.data(), skip=st.booleans())
def test_decode_agrees_with_the_tokenizers_own(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    """On any tokens where it is byte-level; where bytes are a fallback, on tokens whose bytes make characters.

    (A run of byte tokens that is not UTF-8 is one U+FFFD a byte there, also for the characters in it that are whole.)
    """
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.hf) - 1), max_size=24))
    ours = tokenizer.decode(ids, skip_special_tokens=skip)
    if tokenizer.rules.byte_fallback and "\ufffd" in ours:
        return
    assert ours == tokenizer.hf.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def test_every_token_on_its_own_agrees(tokenizer: Tokenizer) -> None:
    backend = tokenizer.hf.backend_tokenizer
    table = tokenizer.token_bytes
    assert len(table.pieces) == tokenizer.vocab_size
    for token in random.Random(1).sample(range(tokenizer.vocab_size), 400):
        expected = backend.decode([token], skip_special_tokens=False)
        ours = tokenizer.strip_start(table.pieces[token]).decode("utf-8", "replace")
        assert ours == expected, tokenizer.id_to_token(token)
        assert (token in table.special) == (expected != "" and backend.decode([token], skip_special_tokens=True) == "")
        assert tokenizer.token_text(token) == table.pieces[token].decode("utf-8", "replace")


def test_sentencepiece_pieces(sentencepiece: Tokenizer) -> None:
    pieces = sentencepiece.token_bytes.pieces
    assert pieces[3 + 10] == b"\n"
    assert pieces[3 + 0xE4] == b"\xe4"
    space = sentencepiece.hf.backend_tokenizer.token_to_id("▁")
    assert pieces[space] == b" "
    assert sentencepiece.decode(sentencepiece.encode("  two")) == "  two"


def test_byte_tokens_that_are_not_utf8_decode_one_by_one(sentencepiece: Tokenizer) -> None:
    whole = [3 + byte for byte in "é".encode()]
    assert sentencepiece.decode([*whole, 3 + 0xFF]) == "é\ufffd"


def test_ids_outside_the_vocabulary_are_the_callers_fault(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="below") as error:
        byte_level.decode([byte_level.vocab_size])
    assert error.value.param == "tokens"


def test_lone_surrogates_are_the_callers_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError) as error:
        tokenizer.encode("a\ud800b")
    assert error.value.param == "prompt"


@pytest.mark.parametrize(
    "make", [lambda n: "a" * n, lambda n: " " * n, lambda n: "ab " * (n // 3), lambda n: "\n \t" * (n // 3)]
)
def test_encoding_time_grows_with_length_not_its_square(tokenizer: Tokenizer, make: object) -> None:
    assert callable(make)

    def seconds(length: int) -> float:
        """The best of three: the collector may run in one."""
        text, times = make(length), []
        for _ in range(3):
            start = time.process_time()
            tokenizer.encode(text)
            times.append(time.process_time() - start)
        return min(times)

    seconds(1000)
    small, large = max(seconds(20_000), 1e-3), seconds(160_000)
    assert large < 30 * small, f"8 times the text took {large / small:.0f} times as long"


def test_token_bytes_travel_without_their_indexes(byte_level: Tokenizer) -> None:
    table = byte_level.token_bytes
    assert table.index.num_with_text > table.visible_index.num_with_text
    copy = pickle.loads(pickle.dumps(table))  # noqa: S301
    assert (copy.pieces, copy.special) == (table.pieces, table.special)
    assert "index" not in copy.__dict__


def test_decoders_without_meaning_token_by_token_are_refused() -> None:
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def files_of(directory: Path, vocab_size: int) -> ModelFiles:
    config = PreTrainedConfig(vocab_size=vocab_size)
    return ModelFiles(
        name="test",
        kind="dummy",
        directory=directory,
        weight_files=[],
        config=config,
        generation_config={"eos_token_id": [0, 7]},
    )


def test_tokenizer_of_a_directory(tmp_path: Path) -> None:
    vocabularies.byte_level().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(files_of(tmp_path, 512))
    assert tokenizer.vocab_size == len(tokenizer.token_bytes.pieces) == 512
    assert tokenizer.eos_token_ids == [0, 7]
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
    other = load_tokenizer(files_of(tmp_path / "nowhere", 512), str(tmp_path))
    assert other.encode("the cat") == tokenizer.encode("the cat")


def test_missing_or_corrupt_tokenizers_are_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(files_of(tmp_path, 512))
    vocabularies.byte_level().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(files_of(tmp_path, 512))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        load_tokenizer(files_of(tmp_path, 512), str(tmp_path / "notes.txt"))


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
    )
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(ConfigError):
        load_tokenizer(files_of(tmp_path, 512))
    assert not (tmp_path / "ran").exists()


def test_bytes_of_a_big_vocabulary_are_quickly_made(request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue("qwen3")
    again = Tokenizer(tokenizer.hf)
    start = time.process_time()
    assert len(again.token_bytes.pieces) > 150_000
    assert time.process_time() - start < 3.0  # far above what it takes: only a wrong method fails


def test_hidden_tokens_have_no_visible_bytes() -> None:
    table = TokenBytes([b"a", b"<s>", b""], frozenset({1, 99}))
    assert table.visible == [b"a", b"", b""]
    assert table.pieces[1] == b"<s>"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "embedded"])
def test_parts_of_a_text_are_encoded_one_behind_the_other(name: str, request: pytest.FixtureRequest) -> None:
    """Nothing comes between them, and what spells a special token across two of them is text."""
    tokenizer: Tokenizer = request.getfixturevalue(name)
    special = next(iter(tokenizer.special_tokens.values()))
    text = f"once {special} upon"
    apart = tokenizer.encode_parts([f"once {special[0]}", special[1:], " upon"], False)
    assert tokenizer.decode(apart, skip_special_tokens=False) == text
    assert tokenizer.token_bytes.special.isdisjoint(apart)
    assert not tokenizer.token_bytes.special.isdisjoint(tokenizer.encode(text, False))
    assert tokenizer.encode_parts([text], False) == tokenizer.encode(text, False)


@pytest.mark.parametrize("failure", [PanicException("byte index 1 is not a char boundary\nstack"), Exception("no [UNK] token")])
def test_a_text_at_which_the_library_fails_is_refused(failure: BaseException) -> None:
    class Backend:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise failure

    tokenizer = Tokenizer(vocabularies.byte_level())
    tokenizer._backend = Backend()
    with pytest.raises(RequestError, match=r"^stop: the model's tokenizer fails at this text: [a-z0-9 \[\]UNK]+$") as caught:
        tokenizer.encode("x", param="stop")
    assert caught.value.param == "stop"
