"""The next turn of a stored response extends the tokens of its prompt and answer, however the model spelled it."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from typing import Any

import pytest
from support import vocabularies
from support.server.harness import client
from support.server.scripted import ScriptedLLM

from headrace.server.settings import ServerSettings
from headrace.text.tokenizer import Tokenizer
from headrace.text.transcript import Transcript

WORDS = "The mill stands by the river."


def letters(made: Tokenizer, text: str) -> list[int]:
    """A token for each character: the tokenizer gives fewer to words."""
    tokens = [token for letter in text for token in made.encode(letter)]
    assert made.decode(tokens) == text and len(tokens) > len(made.encode(text))
    return tokens


def converse(llm: ScriptedLLM, turns: list[dict[str, Any]], settings: ServerSettings | None = None) -> None:
    """Each turn continues the response of the one before."""

    async def run() -> None:
        previous = None
        async with client(llm, settings) as http:
            for turn in turns:
                answer = await http.post("/v1/responses", json={**turn, "previous_response_id": previous})
                assert answer.status_code == 200, answer.text
                previous = answer.json()["id"]

    asyncio.run(run())


@pytest.mark.parametrize("escape", ["none", "user"])
def test_a_turn_extends_the_tokens_of_those_before(embedded: Tokenizer, escape: Any) -> None:
    said = letters(embedded, WORDS)
    llm = ScriptedLLM(embedded, [said])
    turns = [{"input": text} for text in ("Where <|im_end|> is it?", "Again <|im_start|>, please.", "Sure?")]
    converse(llm, turns, ServerSettings(escape_special_tokens=escape))
    (end,), (start,) = embedded.eos_token_ids, embedded.encode("<|im_start|>")
    for before, after in itertools.pairwise(llm.seen):
        known = [*before.prompt_token_ids, *said, end]
        rest = after.prompt_token_ids[len(known) :]
        assert after.prompt is not None and after.prompt_token_ids[: len(known)] == known
        assert embedded.decode(after.prompt_token_ids, skip_special_tokens=False) == after.prompt
        if escape == "none":
            assert embedded.encode(after.prompt)[-len(rest) :] == rest
        assert (rest.count(start), rest.count(end)) == (2 + (escape == "none" and "Again" in embedded.decode(rest)), 1)


def test_a_prompt_that_does_not_begin_so_is_the_tokenizers(embedded: Tokenizer) -> None:
    said = letters(embedded, WORDS)
    cases: list[tuple[list[int], dict[str, Any], dict[str, Any]]] = [
        (said, {}, {"instructions": "Be brief."}),
        (said, {"max_output_tokens": 5}, {}),
        ([*said, embedded.encode("<|im_start|>")[0], *said], {}, {}),
        ([*said, embedded.encode("水")[0], *said], {}, {}),
    ]
    for answer, first, second in cases:
        llm = ScriptedLLM(embedded, [answer])
        converse(llm, [{"input": "Where?", **first}, {"input": "So?", **second}])
        prompt = llm.seen[1].prompt or ""
        assert WORDS[:5] in prompt and llm.seen[1].prompt_token_ids == embedded.encode(prompt)


def test_the_tokens_of_a_text_are_those_of_its_parts_around_a_special_token(tokenizer: Tokenizer) -> None:
    """No token reaches across the end of a special token: what is behind it may be encoded on its own."""
    end = tokenizer.eos_token_ids[0]
    assert end in tokenizer.token_bytes.special
    mark = tokenizer.token_text(end)
    starts = ["", " a", "A mill\n"]
    for start in starts:
        said = tokenizer.encode(start + mark, add_special_tokens=False)
        transcript = Transcript((start + mark).encode(), array("i", said))
        for text in ["", "\n", " ", "\n\n", "x", mark, *vocabularies.PROBES]:
            whole = start + mark + text
            expected = tokenizer.encode(whole, add_special_tokens=False)
            assert transcript.continued(tokenizer, [whole]) == expected, whole
            assert transcript.continued(tokenizer, [start, mark + text]) == expected
        assert transcript.continued(tokenizer, [f"b{start}{mark}"]) is None


def test_there_is_no_cut_where_the_tokenizer_makes_one_token_of_both_sides(embedded: Tokenizer) -> None:
    (letter,) = embedded.encode("a")
    transcript = Transcript(b"a", array("i", [letter]))
    assert transcript.continued(embedded, ["a."]) == embedded.encode("a.")
    assert transcript.continued(embedded, ["and"]) is None
