"""The agent benchmark: a hybrid reuses what an endless cache would, within its budget, and answers as without a cache."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.fake_vllm import VLLM
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
        return report | {"preemptions": llm.stats.num_preemptions}


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
    options = dataclasses.replace(SMALL, conversations=6)
    ample = play(folder, options)
    wanted = ample["answers"]
    assert ample["prefix_cache"]["share_of_ideal"] >= 0.97
    for changes in (
        {"state_snapshot_bytes": 12 * STATE},
        {"enable_prefix_caching": False},
        {"state_snapshot_bytes": STATE},
        {"state_snapshot_bytes": 0},
        {"kv_cache_memory": 600 << 10},
        {"max_num_batched_tokens": 100, "block_size": 32},
        {"pipeline_depth": 2},
        {"pipeline_depth": 2, "kv_cache_memory": 600 << 10},
    ):
        report = play(folder, options, **{"max_num_seqs": 8} | changes)
        assert report["answers"] == wanted, changes
        assert report["preemptions"] > 0 or "kv_cache_memory" not in changes, changes


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


def test_the_peer_plays_the_same_conversations(folder: Path, tmp_path: Path) -> None:
    """It reuses what a cache in blocks of 128 tokens has, and its prompts are as long as headrace's."""
    caching = VLLM.replace('not given["enable_prefix_caching"]', 'given["enable_prefix_caching"]').replace("0.6", "0.0")
    answering = caching.replace(
        "        return [types.SimpleNamespace(outputs=[each]) for each in made]\n",
        "        assert use_tqdm is False\n"
        "        seen = [len(each['prompt_token_ids']) // 256 * 128 for each in prompts]\n"
        "        return [types.SimpleNamespace(outputs=[m], num_cached_tokens=n) for m, n in zip(made, seen)]\n",
    )
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(answering)
    chosen = [f"--agent={name}={getattr(SMALL, name)}" for name in ("conversations", "turns", "subagents", "scale")]
    peer = Path(__file__).parents[2] / "benchmarks" / "vllm_peer.py"
    done = subprocess.run(
        [sys.executable, peer, "--model", folder, "--workloads", "agent", "--max-len", "704", *chosen],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    row, lengths, prompts = json.loads(done.stdout.splitlines()[-1]), 0, 0
    twin = agent.Agents(SMALL, VOCAB, 704, None)
    while twin.open:
        lengths, prompts = lengths + sum(map(len, twin.prompts())), prompts + len(twin.open)
        twin.answered([[0] * twin.answer_len for _ in twin.open])
    assert (row["workload"], row["requests"]["sent"], row["input_tokens"]) == ("agent", prompts, lengths)
    assert 0 < row["prefix_cache"]["reused"] < row["prefix_cache"]["prompt_tokens"] == lengths
    assert row["seconds"] >= 0.01 * row["rounds"]
