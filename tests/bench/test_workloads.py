"""The random workloads are fixed for ever: two engines' rows compare only if both ran the same tokens."""

from __future__ import annotations

import hashlib
import json

import pytest

from headrace.bench.workloads import (
    PICTURE_WORKLOADS,
    PUBLISHED_WORKLOADS,
    RANDOM_WORKLOADS,
    TEXT_WORKLOADS,
    Workload,
    build,
    names,
    prose,
)
from headrace.errors import ConfigError

RECORDED = {
    "single": (1, 128, 256, "0704c45acd10aa0d"),
    "batch8": (8, 2048, 2048, "b6ef1ec29397928b"),
    "batch64": (64, 16384, 16384, "2c1e1598d4805bf8"),
    "mixed256": (256, 144831, 144160, "e47ab8dda3096273"),
    "prefill8k": (16, 131072, 16, "8be06422629f3584"),
    "longctx_decode": (16, 262144, 2048, "e7ff8c4266b5207f"),
    "prefill16k": (1, 16384, 1, "8b7d5002fcb8cd44"),
    "prefill32k": (1, 32768, 1, "688519d73b2f0f67"),
    "prefill64k": (1, 65536, 1, "dced56ba9dc5c265"),
    "prefill128k": (1, 131072, 1, "2be9c1e7d20d043a"),
}
"""name -> requests, tokens in, tokens out, the beginning of the SHA-256 of prompts and lengths as JSON."""


def checksum(load: Workload) -> str:
    return hashlib.sha256(json.dumps([load.prompts, load.output_lens]).encode()).hexdigest()[:16]


class Letters:
    """A tokenizer of one token a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 500 for letter in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


@pytest.mark.parametrize("name", RECORDED)
def test_random_workloads_are_as_recorded(name: str) -> None:
    load = RANDOM_WORKLOADS[name]()
    requests, inputs, outputs, digest = RECORDED[name]
    assert (len(load.prompts), load.input_tokens, load.output_tokens) == (requests, inputs, outputs)
    assert checksum(load) == digest
    assert load.name == name


def test_all_are_recorded() -> None:
    assert set(RECORDED) == set(RANDOM_WORKLOADS)
    assert set(names()) == {*RANDOM_WORKLOADS, *PUBLISHED_WORKLOADS, *PICTURE_WORKLOADS, *TEXT_WORKLOADS}


def test_published_lengths() -> None:
    """One is made; others have up to 20 million tokens."""
    assert len(PUBLISHED_WORKLOADS) == 10
    load = build("isl128-osl4096", None)
    assert (len(load.prompts), load.input_tokens, load.output_tokens) == (1500, 1500 * 128, 1500 * 4096)
    assert (load.name, checksum(load)) == ("isl128-osl4096", "c496ace1955f11d9")


def test_folding_keeps_lengths() -> None:
    load = build("mixed256", None)
    folded = load.folded(1000)
    assert max(map(max, folded.prompts)) < 1000
    assert list(map(len, folded.prompts)) == list(map(len, load.prompts))
    assert folded.output_lens == load.output_lens


@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_text_workloads(name: str) -> None:
    load = build(name, Letters())
    assert len(load.prompts) == len(load.output_lens) >= 32
    assert all(load.prompts) and len({tuple(prompt) for prompt in load.prompts}) == len(load.prompts)
    assert load.longest == max(len(prompt) + n for prompt, n in zip(load.prompts, load.output_lens, strict=True))


def test_copies_are_more_of_the_same_requests() -> None:
    load = build("batch8", None)
    assert load.copied(1) is load
    twice = load.copied(2)
    assert (twice.name, twice.input_tokens, twice.output_tokens) == ("batch8 x2", 2 * 8 * 256, 2 * 8 * 256)
    assert twice.prompts == [*load.prompts, *load.prompts]


def test_shared_prompts_begin_the_same() -> None:
    shared, plain = build("chat_shared", Letters()), build("chat", Letters())
    assert len({tuple(prompt[:500]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt[:20]) for prompt in plain.prompts}) > 20


def test_prose_has_exact_lengths_and_no_common_beginnings() -> None:
    load = prose(Letters(), "prose", 32, 4000, 7)
    assert {len(prompt) for prompt in load.prompts} == {4000}
    assert load.output_lens == [7] * 32
    assert len({tuple(prompt[:16]) for prompt in load.prompts}) == 32


def test_what_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match="there are single"):
        build("nothing", None)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        build("chat", None)
