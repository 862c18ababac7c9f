"""A hybrid behind the server: what turns and branches of conversations find in its cache, and what is said about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from support.models.hybrids import CASES, redraw
from support.models.tiny_pooling import write_pooling_config
from support.server.harness import running
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.config import EngineArgs
from headrace.frontend.async_llm import AsyncLLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)
"""A template that drops the reasoning of earlier answers, as Qwen 3.5's does."""
SYSTEM = {"role": "system", "content": "Be brief, and never repeat yourself. " * 10}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, (kind, values) = tmp_path_factory.mktemp("hybrid"), CASES["qwen3.5"]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values | {"vocab_size": 272})).float()
    redraw(model)
    write_pooling_config(folder)
    model.save_pretrained(folder)
    args = EngineArgs(model=str(folder), dtype="float32", kv_cache_memory=32 << 20, num_threads=1)
    with (
        running(AsyncLLM(args, chat_template=TEMPLATE)) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def ask(http: httpx.Client, *messages: dict[str, str], **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the answer, which must be that of an empty cache, and its explanation."""
    body = {"messages": [SYSTEM, *messages], "max_tokens": 16, "temperature": 0} | fields
    cold = http.post("/v1/chat/completions", json=body | {"cache_salt": str(hash(json.dumps(body)))}).json()
    found = http.post("/v1/chat/completions", json=body).json()
    assert [one["message"] for one in found["choices"]] == [one["message"] for one in cold["choices"]]
    explained = http.get(f"/v1/explain/{found['id']}").json()
    assert (
        found["usage"]["prompt_tokens_details"]["cached_tokens"] == explained["cached_tokens"] == explained["cache"]["reused"]
    )
    return found, explained


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_second_turn_reuses_the_first_and_says_how_much(http: httpx.Client) -> None:
    question = user("Which rivers of the north are long? " * 50)
    first, explained = ask(http, question)
    assert explained["cache"]["reused"] == 0 and len(explained["cache"]["points"]) == 2
    answer = {"role": "assistant", "content": f"<think>hm</think>{first['choices'][0]['message']['content'] or 'None.'}"}
    _, explained = ask(http, question, answer, user("And lakes?"))
    reused, found = explained["cache"]["reused"], explained["cache"]["attention"]
    assert found >= reused >= 0.97 * first["usage"]["prompt_tokens"]
    said = f"The KV of {found} tokens was found, and {reused} were reused: snapshots of the states are taken at multiples of 64"
    assert found == reused or any(reason.startswith(said) for reason in explained["reasons"])
    samples, explained = ask(http, question, answer, user("And lakes?"), n=3)
    assert explained["cache"]["reused"] >= reused and len(samples["choices"]) == 3


def test_the_third_sibling_hits_at_the_fork_however_short_the_rest_is(http: httpx.Client) -> None:
    """Of more than 900 shared tokens behind the instructions the second finds none, and says so; the third finds them."""
    told = [ask(http, user("word " * 180 + letter * 250))[1] for letter in "abc"]
    fork = told[2]["cache"]["reused"]
    assert told[0]["cache"]["reused"] < told[1]["cache"]["reused"] + 64 < fork - 800
    assert f"one is taken now at {fork:,}" in told[1]["cache"]["why"] and fork in told[1]["cache"]["points"]


def test_why_short_prompts_find_nothing(http: httpx.Client) -> None:
    body = {"messages": [user("Hello there")], "max_tokens": 2}
    for _ in range(2):
        answer = http.post("/v1/chat/completions", json=body).json()
    reasons = http.get(f"/v1/explain/{answer['id']}").json()["reasons"]
    assert reasons[0] == f"All {answer['usage']['prompt_tokens']} prompt tokens were computed."
    assert "snapshots of the states are taken at multiples of 64 tokens" in reasons[1]
