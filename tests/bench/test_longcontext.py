"""Long-document tasks: what is asked is in the text, lengths and seeds are kept; and the whole command on a tiny model."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import paw
from support.models.tiny_llama import VOCAB, write_tokenizer
from typer.testing import CliRunner

from headrace import LLM, SamplingParams
from headrace.bench.longcontext import Mode
from headrace.bench.longcontext_tasks import TASKS, Sample, build, read_data, score
from headrace.cli.main import app
from headrace.config import EngineArgs
from headrace.errors import ConfigError


class Bytes:
    """One token a byte, after a token for the start of the text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        raise AssertionError("documents have no chat template")


def text(sample: Sample) -> str:
    assert sample.prompt.count(0) == 1 and sample.prompt[0] == 0
    return bytes(sample.prompt[1:]).decode()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [2000, 5000])
def test_documents_have_their_length_and_repeat_with_their_seed(task: str, length: int) -> None:
    first = build(Bytes(), task, length, 0, seed=1)
    # Filled up to less than the longest sentence.
    assert length - 300 < len(first.prompt) <= length
    assert build(Bytes(), task, length, 0, seed=1) == first
    others = [build(Bytes(), task, length, 1, seed=1), build(Bytes(), task, length, 0, seed=2)]
    assert len({text(first), *map(text, others)}) == 3 and all(other.answers != first.answers for other in others)
    assert all(answer in text(first) for answer in first.answers) and all(answer in first.target for answer in first.answers)
    assert score(first, first.target) == 1.0 and score(first, "none of it") == 0.0


def test_too_short_documents_and_unknown_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="300 tokens are too few for the task variables"):
        build(Bytes(), "variables", 300, 0, seed=0)
    with pytest.raises(ConfigError, match="no task 'poem'; there are needle, multikey, variables, words"):
        build(Bytes(), "poem", 3000, 0, seed=0)


@pytest.mark.parametrize(("task", "keys"), [("needle", 1), ("multikey", 8)])
def test_the_answer_is_the_number_of_the_key_that_is_asked_for(task: str, keys: int) -> None:
    for index in range(3):
        sample = build(Bytes(), task, 4000, index, seed=0)
        document, question = text(sample).rsplit("\n", 1)
        numbers = dict(re.findall(r"magic numbers for (\w+) is: (\d+)\.", document))
        (key,) = set(re.findall(r"magic number for (\w+) mentioned", question))
        assert len(numbers) == keys and sample.answers == [numbers[key]] and numbers[key] not in question


def test_the_chain_of_variables_leads_from_the_value_in_the_order_of_the_text() -> None:
    sample = build(Bytes(), "variables", 4000, 0, seed=0)
    document, question = text(sample).rsplit("\n", 1)
    values, found = {}, []
    for name, _, right in re.findall(r"VAR (\w+) = (VAR )?(\w+)\.", document):
        values[name] = values.get(right, right)
        found.append(name)
    assert found == sample.answers and f"the value {values[found[0]]}" in question and len(set(values.values())) == 1


def test_common_words_are_the_most_common_ones() -> None:
    sample = build(Bytes(), "words", 6000, 0, seed=0)
    counts = collections.Counter(text(sample).split("\n")[1].split()).most_common()
    assert {word for word, _ in counts[:5]} == set(sample.answers)
    assert counts[4][1] > 5 * counts[5][1]


def test_lines_of_a_file_are_cut_in_the_middle_and_scored_by_f1(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    record: dict[str, Any] = {"context": "a" * 300 + "b" * 300, "input": "Who?", "answers": ["The Miller's wife", "she"]}
    path.write_text("".join(json.dumps(record | change) + "\n" for change in ({}, {"context": "short"}, {"input": "What?"})))
    cut, whole = read_data(Bytes(), path, 200, 2)
    assert len(cut.prompt) == 200 and re.fullmatch(r"a{8,}b{8,}\n\nQuestion: Who\?\nAnswer:", text(cut))
    assert text(whole) == "short\n\nQuestion: Who?\nAnswer:" and whole.target == " The Miller's wife"
    assert score(whole, "It was the miller's wife!") == pytest.approx(2 * 2 / (4 + 2))
    assert score(whole, "She.") == 1.0
    for bad in ("no json", "[]", json.dumps(record | {"answers": []}), json.dumps(record | {"input": 3})):
        path.write_text(json.dumps(record) + "\n" + bad)
        with pytest.raises(ConfigError, match="line 2 of"):
            read_data(Bytes(), path, 200, 9)


def test_modes() -> None:
    assert [str(Mode.parse(mode)) for mode in ("dense", "xattn:0.80", "elastic")] == ["dense", "xattn:0.8", "elastic"]
    made = Mode.parse("mean:0.2").args(EngineArgs())
    assert (made.sparse_prefill, made.sparse_threshold, made.sparse_min_tokens) == ("mean", 0.2, 0)
    for wrong in ("dense:1", "flux", "xattn:much"):
        with pytest.raises(ConfigError):
            Mode.parse(wrong)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny PawQwen3 whose tokens are bytes."""
    folder, weights = tmp_path_factory.mktemp("paw"), paw.tensors()
    torch.manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.randn(VOCAB, weights[name].shape[1])
    write_tokenizer(paw.write(folder, weights, vocab_size=VOCAB, eos_token_id=257))
    return folder


def bench(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "longcontext", *words, "--device", "cpu", "--kv-cache-memory", "16MiB"])


def test_the_command_compares_modes(checkpoint: Path, tmp_path: Path) -> None:
    dump, saved = tmp_path / "dump.jsonl", tmp_path / "report.json"
    words = ["--tasks", "needle", "--lengths", "900", "--samples", "1", "--modes", "dense,xattn:0.3,elastic"]
    result = bench(str(checkpoint), *words, "--router-dump", str(dump), "--output", str(saved))
    assert result.exit_code == 0, result.output
    report = json.loads(saved.read_text())
    rows = {row["mode"]: row for row in report["rows"]}
    assert list(rows) == ["dense", "xattn:0.3", "elastic"] and all(mode in result.stdout for mode in rows)
    assert rows["dense"]["density"] == 1.0 and 0 < rows["xattn:0.3"]["density"] < 0.9 and rows["dense"]["ttft"] > 0
    lines = {line["mode"]: line for line in map(json.loads, dump.read_text().splitlines())}
    assert lines["dense"]["attention"] is None and lines["elastic"]["attention"]["head_types"]
    assert lines["xattn:0.3"]["attention"]["density"] == rows["xattn:0.3"]["density"]
    # What the constraint holds the engine to has the log-probabilities of the same text as a dense prompt.
    with LLM(str(checkpoint), device="cpu", kv_cache_memory=2**24, sparse_prefill="off") as llm:
        sample = build(llm.get_tokenizer(), "needle", 900, 0, seed=0)
        target = llm.get_tokenizer().encode(sample.target, add_special_tokens=False)
        (output,) = llm.generate(
            [{"prompt_token_ids": sample.prompt + target}], SamplingParams(max_tokens=1, prompt_logprobs=0)
        )
    assert output.prompt_logprobs is not None
    entries = output.prompt_logprobs[len(sample.prompt) :]
    right = [entry[token].logprob for entry, token in zip(entries, target, strict=True) if entry is not None]
    assert rows["dense"]["answer_logprob"] == pytest.approx(sum(right) / len(target), abs=1e-3)
    assert rows["xattn:0.3"]["answer_logprob"] != pytest.approx(rows["dense"]["answer_logprob"], abs=1e-4)


def test_modes_without_effect_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    result = bench(str(checkpoint), "--lengths", "900", "--tasks", "needle", "--modes", "xattn", "--sparse-min-tokens", "950")
    assert result.exit_code == 2 and "--sparse-min-tokens is larger" in result.output
    result = bench(str(checkpoint), "--lengths", "1400", "--tasks", "needle", "--modes", "dense")
    assert result.exit_code == 2 and "exceed the context of 1024" in result.output
