"""The agent benchmark: a hybrid reuses what an endless cache would, within its budget, and answers as without a cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.hybrids import CASES, redraw
from support.models.tiny_llama import VOCAB, write_tokenizer
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace import LLM
from headrace.bench import agent
from headrace.bench.options import AgentOptions
from headrace.errors import ConfigError

SMALL = AgentOptions(conversations=3, turns=5, subagents=1.0, scale=0.03)
"""Instructions of 180 tokens, turns of 9 to 240, answers of 13."""
STATE = 3 * 4 * 16 * 16 * 4 + 3 * 3 * 128 * 4
"""Bytes of a state of the model: matrices of three layers, and inputs of their convolutions."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, (kind, values) = tmp_path_factory.mktemp("hybrid"), CASES["qwen3.5"]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values | {"vocab_size": VOCAB})).float()
    redraw(model)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def play(folder: Path, options: AgentOptions = SMALL, **changes: object) -> dict:
    values = {"max_model_len": 704, "kv_cache_memory": 16 << 20, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32"}
    with LLM(str(folder), **values | changes) as llm:
        report = agent.run(llm, options, tell=lambda text: None)
        llm.check_integrity()
    return report


def test_agents_reuse_what_an_endless_cache_has(folder: Path) -> None:
    """Nine tenths of it, with few snapshots."""
    report = play(folder, state_snapshot_bytes=12 * STATE)
    found = report["prefix_cache"]
    assert report["subagents"] and report["compactions"] and report["requests"]["succeeded"] > 15
    assert 6 < report["snapshots"]["most"] <= 12 < sum(report["snapshots"]["saved"].values())
    assert found["share_of_ideal"] >= 0.9
    assert found["prompt_tokens"] == found["reused"] + sum(found["computed"].values())


@pytest.mark.slow
def test_answers_do_not_depend_on_the_cache(folder: Path) -> None:
    """Preempted in a small cache, without one, with one snapshot or none, and in other steps."""
    ample = play(folder)
    wanted = ample["answers"]
    assert ample["prefix_cache"]["share_of_ideal"] >= 0.97
    for changes in (
        {"state_snapshot_bytes": 12 * STATE},
        {"enable_prefix_caching": False},
        {"state_snapshot_bytes": STATE},
        {"state_snapshot_bytes": 0},
        {"kv_cache_memory": 2 << 20},
        {"max_num_batched_tokens": 100, "block_size": 32},
    ):
        assert play(folder, **changes)["answers"] == wanted, changes


def test_a_context_that_is_too_short_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit in 51, 80% of max_model_len") as caught:
        agent.Agents(SMALL, 256, 64, None)
    assert caught.value.param == "--scale"


def test_a_turn_begins_with_the_mark() -> None:
    agents = agent.Agents(AgentOptions(conversations=1, turns=2, subagents=0.0, scale=0.01), 200, 1024, 199)
    (first,) = agents.prompts()
    assert first[0] == first[-1] == 199 and first.count(199) >= 3
    agents.answered([[5, 6]])
    (second,) = agents.prompts()
    assert second[: len(first) + 2] == [*first, 5, 6]
    agents.answered([[5, 6]])
    assert agents.open == []
