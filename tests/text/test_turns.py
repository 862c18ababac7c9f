"""Boundaries of turns in the tokens of a conversation."""

from __future__ import annotations

import pytest
from support.vocabularies import train_byte_level
from transformers import PreTrainedTokenizerFast

from headrace.text.tokenizer import Tokenizer
from headrace.text.vocab import TokenBytes

START, END, BOS = 900, 901, 902
turn_boundaries = TokenBytes((), frozenset({START, END, BOS})).turn_boundaries


def turn(length: int) -> list[int]:
    return [START, *range(length), END, 10]


def test_the_boundaries_are_before_the_second_turn_and_the_answer() -> None:
    system, user, answer = turn(20), turn(7), turn(5)
    prompt = [BOS, *system, *user, *answer, *user, START, 1, 2]
    assert turn_boundaries(prompt) == (1 + len(system), len(prompt) - 3)


def test_a_first_question_has_one_boundary() -> None:
    assert turn_boundaries([BOS, *turn(9), START, 1]) == (13,)


def test_plain_prompts_have_none() -> None:
    assert turn_boundaries([]) == turn_boundaries([BOS, 1, 2]) == ()
    assert turn_boundaries([START, *range(100), START, *range(100)]) == (), "no answer begins near the end"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content and KEPT %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}PUT{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\nOPEN"
)
"""Templates drop the reasoning of earlier answers, or of those before the last question. PUT: what they write in its place."""
HYBRIDS = {
    "qwen3.5": CHATML.replace("OPEN", "<think>\n").replace("KEPT", "false").replace("PUT", ""),
    "lfm2": CHATML.replace("OPEN", "").replace("KEPT", "true").replace("PUT", ""),
    "nemotron-h": CHATML.replace("OPEN", "<|think|>\n")
    .replace("KEPT", "false")
    .replace("PUT", "{% if m.role == 'assistant' %}<|think|><|/think|>{% endif %}"),
    "granite": (
        "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "kimi": (
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "<|im_assistant|>assistant<|im_middle|>"
    ),
}
SPECIAL = (
    *("im_start", "im_end", "im_middle", "im_system", "im_user", "im_assistant", "start_of_role", "end_of_role"),
    *("think", "/think"),
)


@pytest.fixture(scope="module")
def spelled() -> PreTrainedTokenizerFast:
    """Letters and special tokens."""
    backend = train_byte_level()
    backend.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_next_prompt_repeats_what_lies_before_the_answer(name: str, spelled: PreTrainedTokenizerFast) -> None:
    """With templates in the forms of hybrid models: the last boundary is one of both prompts, however the answer is rewritten,
    and the first is one of all conversations with the same instructions."""
    own = Tokenizer(spelled)
    own.hf.chat_template = HYBRIDS[name]
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which rivers are long?"}
    told = [system, question]
    prompt = own.encode_chat(told)
    other = own.encode_chat([system, {"role": "user", "content": "And lakes?"}])
    for turn in range(3):
        boundaries = own.token_bytes.turn_boundaries(prompt)
        told += [{"role": "assistant", "content": f"The {turn}th.", "reasoning_content": "hm"}, question]
        later = own.encode_chat(told)
        first, last = boundaries[0], boundaries[-1]
        assert last >= len(prompt) - 20 and later[:last] == prompt[:last]
        assert turn or (first > 4 and other[:first] == prompt[:first])
        prompt = later
