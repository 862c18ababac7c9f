"""LongBench: what its metrics say of made-up answers, how its files are read, and the whole command on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_llama import write_config
from typer.testing import CliRunner

from headrace.bench.longbench import LongBenchAnswer, read, rows
from headrace.bench.longbench_metrics import TASKS
from headrace.cli.main import app
from headrace.errors import ConfigError

CLASSES = ["Food", "Other entity", "entity", "Date"]


def test_there_are_21_tasks_in_6_categories() -> None:
    assert len(TASKS) == 21 and len({task.category for task in TASKS.values()}) == 6
    assert {name for name, task in TASKS.items() if task.plain} == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


@pytest.mark.parametrize(
    ("task", "answer", "right", "score"),
    [
        ("hotpotqa", "It was the Miller's wife!", ["wife", "the millers wife"], 4 / 6),
        ("qasper", "nothing", ["unanswerable"], 0.0),
        ("triviaqa", "\nParis\nQuestion: more", ["paris"], 1.0),
        ("trec", "Type: Other entity\nQuestion: Food", ["Other entity"], 1.0),
        ("trec", "Food or Date", ["Date"], 0.5),
        ("trec", "entity", ["Other entity"], 0.0),
        ("lsht", "体育", ["Date"], 0.0),
        ("passage_count", "There are 7, or 8, or 7.", ["7"], 2 / 3),
        ("passage_count", "many", ["7"], 0.0),
        ("passage_retrieval_en", "Paragraph 12, not 3", ["Paragraph 12"], 0.5),
        ("passage_retrieval_en", "Paragraph 2", ["Paragraph 12"], 0.0),
        ("passage_retrieval_zh", "段落5", ["段落5"], 1.0),
        ("lcc", "\n```python\n# a comment\nreturn x + 1\nmore", ["return x + 2"], 0.92),
        ("repobench-p", "```", ["return"], 0.0),
    ],
)
def test_metrics(task: str, answer: str, right: list[str], score: float) -> None:
    assert TASKS[task].score(answer, right, CLASSES) == pytest.approx(score)


@pytest.mark.parametrize("task", ["gov_report", "qmsum", "multi_news", "samsum"])
def test_summaries_are_scored_by_rouge(task: str) -> None:
    pytest.importorskip("rouge", reason="the package rouge is not installed: pip install 'headrace[longbench]'")
    right = ["the mill stands by the old river"]
    assert TASKS[task].score(right[0], right, ()) == pytest.approx(1.0, abs=1e-6)
    # 3 of 3 and of 6 different words, in their order.
    assert TASKS[task].score("mill stands river", right, ()) == pytest.approx(2 * 3 / (3 + 6), abs=1e-6)
    assert TASKS[task].score("", right, ()) == 0.0


def test_chinese_words_are_cut_by_jieba() -> None:
    pytest.importorskip("jieba", reason="the package jieba is not installed: pip install 'headrace[longbench]'")
    task = TASKS["multifieldqa_zh"]
    assert task.score("我们来自北京。", ["我们来自北京"], ()) == 1.0
    assert 0 < task.score("我们来自上海", ["我们来自北京"], ()) < 1
    pytest.importorskip("rouge", reason="the package rouge is not installed: pip install 'headrace[longbench]'")
    for name in ("dureader", "vcsum"):
        assert TASKS[name].score("我们来自北京", ["我们来自北京"], ()) == pytest.approx(1.0, abs=1e-6)


def write(folder: Path, **tasks: list[dict[str, Any]]) -> Path:
    """A checkout with the data of some tasks."""
    for part in ("data", "config"):
        (folder / part).mkdir(exist_ok=True)
    for name, records in tasks.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "data" / f"{name.replace('__', '-')}.jsonl").write_text(text)
    prompts = {"hotpotqa": "Read: {context}\nAnswer {input}:", "trec": "{context}\n{input}", "lcc": "Go on: {context}{input}"}
    (folder / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    (folder / "config" / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(prompts, 8)))
    return folder


def record(**fields: Any) -> dict[str, Any]:
    return {"context": "c" * 300, "input": "Who?", "answers": ["the miller"], "length": 60, "all_classes": None} | fields


def test_files_are_read_and_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no folder data"):
        read(tmp_path, [], None)
    folder = write(tmp_path, hotpotqa=[record(), record()], trec=[record(all_classes=CLASSES)], unknown=[record()])
    assert [(work.name, len(work.records), work.max_tokens) for work in read(folder, [], None)] == [
        ("hotpotqa", 2, 8),
        ("trec", 1, 8),
    ]
    assert [len(work.records) for work in read(folder, ["hotpotqa"], 1)] == [1]
    with pytest.raises(ConfigError, match=r"has no lcc\.jsonl; it has hotpotqa, trec"):
        read(folder, ["lcc"], None)
    write(tmp_path, qasper=[record()])
    with pytest.raises(ConfigError, match=r"dataset2prompt\.json has no entry for qasper"):
        read(folder, ["qasper"], None)
    for field, bad in (("answers", []), ("context", 3)):
        write(tmp_path, hotpotqa=[record(), record() | {field: bad}])
        with pytest.raises(ConfigError, match=rf"line 2 of .* is not a record of LongBench: .*{field}"):
            read(folder, ["hotpotqa"], None)


def test_rows_are_means_by_task_and_by_length() -> None:
    def answer(task: str, score: float, length: int) -> LongBenchAnswer:
        fields: dict[str, Any] = {"pred": "", "answers": [""], "all_classes": None, "prompt_tokens": 1, "density": 0.5}
        return LongBenchAnswer(mode="dense", task=task, score=score, length=length, **fields)

    made = [
        answer("lcc", 1.0, 1),
        answer("lcc", 0.0, 1),
        *(answer("trec_e", 1.0, n) for n in (3999, 4000, 9000)),
        answer("trec_e", 0.0, 9),
    ]
    code, shots, whole = rows(made)
    assert (code["score"], code["samples"], code["density"]) == (50.0, 2, 0.5) and "lengths" not in code
    assert shots["lengths"] == {"0-4k": 50.0, "4-8k": 100.0, "8k+": 100.0} and shots["score"] == 75.0
    assert (whole["task"], whole["score"], whole["samples"]) == ("all", 62.5, 6)


def test_the_command(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model")
    folder = write(tmp_path, hotpotqa=[record(), record(context="short")], lcc=[record(answers=["x"])])
    saved = tmp_path / "report.json"
    words = ["bench", "longbench", str(model), "--directory", str(folder), "--length", "120", "--output", str(saved)]
    result = CliRunner().invoke(app, [*words, "--load-format", "dummy", "--device", "cpu", "--kv-cache-memory", "8MiB"])
    assert result.exit_code == 0, result.output
    report = json.loads(saved.read_text())
    assert [row["task"] for row in report["rows"]] == ["hotpotqa", "lcc", "all"] and "hotpotqa" in result.stdout
    long, short, _ = report["requests"]
    assert short["prompt_tokens"] < 60 and 100 < long["prompt_tokens"] <= 120
    assert set(long) >= {"pred", "answers", "all_classes", "length"} and long["density"] == 1.0
    result = CliRunner().invoke(app, ["bench", "longbench", str(model)])
    assert result.exit_code == 2 and "LongBench's files" in result.output
