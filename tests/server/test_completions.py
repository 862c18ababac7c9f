"""/v1/completions: prompts, echo, legacy logprobs, parameters."""

from __future__ import annotations

from typing import Any

import pytest
from support.byte_tokenizer import BOS, EOS, ByteTokenizer
from support.server.fakes import FakeLLM
from support.server.harness import Api, error, events

from headrace.server.settings import ServerSettings


def test_answer(api: Api) -> None:
    answer = api.complete(seed=3).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "Hello 0, wörld € 🙂 seed 3", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert answer["usage"]["prompt_tokens"] == 3, "the tokenizer's own first token counts"


def test_stream_is_the_answer_in_chunks(api: Api) -> None:
    chunks = events(api.complete(stream=True, seed=3, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in parts) == "Hello 0, wörld € 🙂 seed 3"
    assert [chunk["choices"][0]["finish_reason"] for chunk in parts[-2:]] == [None, "stop"]
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in parts)
    assert last["choices"] == [] and last["usage"] == api.complete(seed=3).json()["usage"]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97, 98], [99]], [[97, 98], [99]]),
    ],
)
def test_prompts(api: Api, prompt: Any, tokens: list[list[int]]) -> None:
    answer = api.complete(prompt=prompt, max_tokens=2).json()
    assert [request.prompt_token_ids for request in api.llm.seen] == tokens
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(tokens)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert answer["usage"]["completion_tokens"] == 2 * len(tokens)


def test_without_the_tokenizers_special_tokens(api: Api) -> None:
    api.complete(prompt="ab", add_special_tokens=False)
    assert api.llm.seen[0].prompt_token_ids == [97, 98]


def prompt_in_text(request: Any, index: int) -> list[int]:
    return [*bytes(token for token in request.prompt_token_ids if token < 256), ord("0") + index, EOS]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_ordered_by_prompt_then_sample(stream: bool) -> None:
    response = Api(FakeLLM(script=prompt_in_text)).complete(prompt=["a", "bb", "ccc"], n=2, stream=stream)
    texts = [""] * 6
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert texts == ["a0", "a1", "bb0", "bb1", "ccc0", "ccc1"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Grüße", [[BOS, *"Grüße".encode()]]])
def test_echo(stream: bool, prompt: Any) -> None:
    response = Api(FakeLLM()).complete(prompt=prompt, echo=True, n=2, seed=0, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    echoed = "Grüße" if prompt == "Grüße" else "<bos>Grüße"
    for index in range(2):
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert text == f"{echoed}Hello {index}, wörld € 🙂 seed 0"


def merged(choices: list[dict[str, Any]]) -> dict[str, Any]:
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {key: [entry for part in parts for entry in part[key] or []] for key in parts[0]}


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_and_offsets(stream: bool) -> None:
    llm = FakeLLM(script=lambda request, index: [*"né!".encode(), EOS])
    response = Api(llm).complete(prompt="aé", echo=True, logprobs=1, n=2, stream=stream)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        logprobs = merged(mine)
        accent = ["bytes:\\xc3", "bytes:\\xa9"]
        assert logprobs["tokens"] == ["<bos>", "a", *accent, "n", *accent, "!", "<eos>"]
        assert logprobs["token_logprobs"] == [None, *[-1.5] * 8]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][2] == {"a": -0.75, "bytes:\\xc3": -1.5}
        text = "".join(choice["text"] for choice in mine)
        assert text == "aéné!"
        assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 3, 4, 5]


def test_logprobs_zero_gives_no_alternatives(api: Api) -> None:
    logprobs = api.complete(logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    own = {"top_logprobs": [{"H": -1.5}, {"e": -1.5}], "text_offset": [0, 1]}
    assert logprobs == {"tokens": ["H", "e"], "token_logprobs": [-1.5, -1.5], **own}


def test_tokens_of_logprobs_as_ids(api: Api) -> None:
    """Trainers read the ids of alternatives from their names."""
    fields = {"max_tokens": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    [choice] = api.complete(logprobs=0, **fields).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:72"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:72": -1.5}]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([72], [BOS, 72, 105])
    [entry] = api.chat(logprobs=True, top_logprobs=1, **fields).json()["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:72", None)
    assert [other["token"].partition(":")[0] for other in entry["top_logprobs"]] == ["token_id"]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_zero_scores_the_prompt(stream: bool) -> None:
    response = Api(FakeLLM()).complete(prompt="abc", echo=True, logprobs=2, max_tokens=0, stream=stream, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    [choice] = choices
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "length", [])
    assert choice["logprobs"]["tokens"] == ["<bos>", "a", "b", "c"]
    assert choice["prompt_token_ids"] == [BOS, 97, 98, 99]
    if not stream:
        assert response.json()["usage"]["completion_tokens"] == 0
        assert response.json()["usage"]["total_tokens"] == 4


def test_prompt_logprobs_a_choice(api: Api) -> None:
    answer = api.complete(prompt=["ab", "c"], prompt_logprobs=0, n=2).json()
    lengths = [len(choice["prompt_logprobs"]) for choice in answer["choices"]]
    assert lengths == [3, 3, 2, 2]
    assert answer["choices"][0]["prompt_logprobs"][1] == {"97": {"logprob": -1.5, "rank": 2, "decoded_token": "a"}}
    assert answer["choices"][0]["logprobs"] is None


def test_echo_logprobs_do_not_leak_prompt_logprobs(api: Api) -> None:
    assert "prompt_logprobs" not in api.complete(echo=True, logprobs=1).json()["choices"][0]


def test_token_ids_on_request(api: Api) -> None:
    [choice] = api.complete(prompt=[97], return_token_ids=True, max_tokens=3).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (list(b"Hel"), [97])


def test_best_of_must_equal_n(api: Api) -> None:
    assert api.complete(best_of=1).status_code == 200
    assert api.complete(best_of=2, n=2).status_code == 200
    assert error(api.complete(best_of=3))["param"] == "best_of"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 2**40]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [[1], [1.5]]}, "prompt[1][0]"),
        ({"prompt": [[1], [9999]]}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 100}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_bad_parameters_are_named(api: Api, fields: dict[str, Any], param: str) -> None:
    assert error(api.complete(**fields))["param"] == param
    assert not api.llm.seen, "nothing runs unless everything can"


def test_one_bad_prompt_stops_all_before_they_start(api: Api) -> None:
    assert error(api.complete(prompt=["fine", "x" * 600]))["code"] == "context_length_exceeded"
    assert not api.llm.seen


def test_limits_are_settings() -> None:
    settings = ServerSettings(max_prompts=2, max_n=2, max_choices=3, max_logit_bias=1)
    api = Api(FakeLLM(), settings)
    assert api.complete(prompt=["a", "b"], stop=["x"], logit_bias={"1": 1}, bad_words=["x"]).status_code == 200
    for fields, param in [
        ({"prompt": ["a"] * 3}, "prompt"),
        ({"n": 3}, "n"),
        ({"prompt": ["a"] * 2, "n": 2}, "n"),
        ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias"),
    ]:
        assert error(api.complete(**fields))["param"] == param


def test_logprobs_of_prompts_are_bounded() -> None:
    settings = ServerSettings(max_prompt_logprobs=4 * 3 * 2)
    body = {"prompt": [97] * 4, "max_tokens": 1, "n": 2}
    api = Api(FakeLLM(), settings)
    for fields in ({"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}):
        answer = api.complete(**body | fields)
        assert answer.status_code == 200, answer.text
        for more in ({"n": 3}, {"prompt": [97] * 5}, {"prompt": [[97] * 4] * 2}):
            assert error(api.complete(**body | fields | more))["param"] == "prompt_logprobs"
    messages = [{"role": "user", "content": "x"}]  # "[user]x\n[assistant]" and logprobs of it once, whatever n is
    assert api.chat(messages=messages, n=2, prompt_logprobs=0).status_code == 200
    assert error(api.chat(messages=messages, prompt_logprobs=1))["param"] == "prompt_logprobs"


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_lists_that_are_too_long_are_refused_before_their_entries_are_read(api: Api, name: str) -> None:
    refused = error(api.complete(**{name: [{}] * 70_000}))
    assert refused["param"] == name and "70000 entries" in refused["message"]


def test_lists_are_as_long_as_the_engine_allows(api: Api) -> None:
    """Its limits may be raised: the server has none of its own."""
    words = [f"word {number}" for number in range(500)]
    assert api.complete(stop=words, bad_words=words).status_code == 200
    assert (api.llm.seen[0].sampling.stop, api.llm.seen[0].sampling.bad_words) == (words, words)


def test_without_a_tokenizer() -> None:
    llm = FakeLLM()
    llm.tokenizer = None
    api = Api(llm)
    assert error(api.complete(prompt="text"))["param"] == "prompt"
    assert error(api.chat())["param"] == "messages"
    [choice] = api.complete(prompt=[97], max_tokens=2, logprobs=0, return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == list(b"He")
    assert choice["logprobs"]["tokens"] == ["token_id:72", "token_id:101"]
    assert llm.seen[0].sampling.detokenize is False


def middle_tokenizer() -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.fim_tokens = {"<fim_prefix>": 1, "<fim_suffix>": 3, "<fim_middle>": 2, "<fim_pad>": 4}
    return tokenizer


@pytest.mark.parametrize("stream", [False, True])
def test_text_before_a_suffix(stream: bool) -> None:
    llm = FakeLLM(script=lambda request, index: [*b"middle", 4, *b"more"])
    llm.tokenizer = middle_tokenizer()
    response = Api(llm).complete(prompt="a", suffix="bc", stream=stream, return_token_ids=True, max_tokens=20)
    parts = [event["choices"][0] for event in events(response)] if stream else response.json()["choices"]
    assert "".join(part["text"] for part in parts).startswith("middle") and "more" not in str(parts)
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", None)
    [request] = llm.seen
    assert request.prompt_token_ids == parts[0]["prompt_token_ids"] == [BOS, 1, *b"a", 3, *b"bc", 2]
    assert request.eos_token_ids == [1, 2, 3, 4, EOS]


def test_every_prompt_gets_the_suffix_and_no_suffix_is_none() -> None:
    llm = FakeLLM()
    llm.tokenizer = middle_tokenizer()
    api = Api(llm)
    assert api.complete(prompt=["a", "b"], suffix="c", add_special_tokens=False).status_code == 200
    assert [bytes(request.prompt_token_ids) for request in llm.seen] == [b"\x01a\x03c\x02", b"\x01b\x03c\x02"]
    assert api.complete(prompt=[97], suffix="c").status_code == 200
    assert bytes(llm.seen[-1].prompt_token_ids) == b"\x01a\x03c\x02"
    for suffix in ("", None):
        assert api.complete(prompt="a", suffix=suffix).status_code == 200
        assert (llm.seen[-1].prompt_token_ids, llm.seen[-1].eos_token_ids) == ([BOS, 97], [EOS])


@pytest.mark.parametrize("fields", [{"suffix": "x" * 600}, {"suffix": "x", "echo": True}, {"suffix": 1}, {"suffix": ["x"]}])
def test_a_suffix_that_cannot_be_served(fields: dict[str, Any]) -> None:
    llm = FakeLLM()
    llm.tokenizer = middle_tokenizer()
    assert error(Api(llm).complete(**fields))["param"] in ("suffix", "prompt")
    assert not llm.seen
    llm.tokenizer = None
    assert error(Api(llm).complete(prompt=[1], suffix="x"))["param"] == "suffix"
