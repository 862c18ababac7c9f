"""LongBench over its authors' files: prompts as they are published, one engine for each mode of attention."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.bench.longbench_metrics import TASKS, LongBenchTask
from headrace.bench.longcontext import Mode, by_mode
from headrace.bench.longcontext_tasks import DocumentRecord, read_records
from headrace.bench.report import table
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError
from headrace.frontend.llm import LLM
from headrace.host.user_files import read_input
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

_BUCKETS = (("0-4k", 4000), ("4-8k", 8000), ("8k+", 2**31))
"""Lengths in words by which LongBench-E reports."""
_EVEN = "_e"
"""End of the names of LongBench-E's tasks, whose lengths are evenly spread."""


class LongBenchRecord(DocumentRecord, frozen=True, kw_only=True):
    """A line of a task's file."""

    length: int = 0
    """Words, or characters in Chinese."""
    all_classes: list[str] | None = None


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One task: its records, the form of its prompts and the tokens of an answer."""

    name: str
    records: list[LongBenchRecord]
    prompt: str
    max_tokens: int

    @property
    def task(self) -> LongBenchTask:
        return TASKS[self.name.removesuffix(_EVEN)]


class LongBenchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer in one mode, with the fields from which LongBench's own script scores it."""

    mode: str
    task: str
    pred: str
    answers: list[str]
    all_classes: list[str] | None
    length: int
    score: float
    prompt_tokens: int
    density: float


def read(folder: Path, names: Sequence[str], count: int | None) -> list[Work]:
    """The tasks of a checkout of LongBench, with the data in its folder ``data``.

    Args:
        names: tasks; none: all that have a file.
        count: records of each task; None: all.

    Raises:
        ConfigError: a file is missing or not LongBench's, or a task's metric needs a package that is not installed.
    """
    option = "--directory"
    if not (folder / "data").is_dir():
        raise ConfigError(f"{folder} has no folder data with LongBench's JSONL files", option)
    there = sorted(file.stem for file in (folder / "data").glob("*.jsonl") if file.stem.removesuffix(_EVEN) in TASKS)
    if not there:
        raise ConfigError(f"{folder / 'data'} has no file of a task, such as narrativeqa.jsonl", option)
    for name in names:
        if name not in there:
            raise ConfigError(f"{folder / 'data'} has no {name}.jsonl; it has {', '.join(there)}", "--tasks")
    prompts = _table(folder / "config" / "dataset2prompt.json", dict[str, str])
    lengths = _table(folder / "config" / "dataset2maxlen.json", dict[str, int])
    found = []
    for name in names or there:
        own = name.removesuffix(_EVEN)
        for file, entries in (("dataset2prompt", prompts), ("dataset2maxlen", lengths)):
            if own not in entries:
                raise ConfigError(f"{folder / 'config' / file}.json has no entry for {own}", option)
        TASKS[own].check_packages()
        records = read_records(folder / "data" / f"{name}.jsonl", LongBenchRecord, count, option)
        found.append(Work(name=name, records=records, prompt=prompts[own], max_tokens=lengths[own]))
    return found


def _table(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(read_input(path, "--directory"), type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not LongBench's: {error}", "--directory") from error


def run(
    args: EngineArgs,
    modes: Sequence[Mode],
    tasks: Sequence[Work],
    *,
    length: int | None,
    tell: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Answers every record greedily in every mode.

    Args:
        length: most tokens of a prompt; None: what the context has room for.
        save: called with the report so far after each mode.

    Raises:
        ConfigError: the engine cannot run a mode, or the context has no room for a prompt.
    """

    def measure(llm: LLM, mode: Mode) -> Iterator[LongBenchAnswer]:
        for work in tasks:
            tell(f"{mode}: {work.name}, {len(work.records)} prompts")
            yield from _answers(llm, mode, work, length)

    return by_mode("longbench", args, modes, measure, rows, tell=tell, save=save)


def _answers(llm: LLM, mode: Mode, work: Work, length: int | None) -> list[LongBenchAnswer]:
    task, tokens = work.task, [_prompt(llm, work, record, length) for record in work.records]
    params = SamplingParams(temperature=0.0, max_tokens=work.max_tokens)
    if task.one_line:
        params = params.replace({"stop": ["\n"], "min_tokens": 1})
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in tokens], params)
    found = []
    for record, prompt, output in zip(work.records, tokens, outputs, strict=True):
        if output.error:
            raise EngineError(output.error)
        text, attention = output.outputs[0].text, output.attention
        found.append(
            LongBenchAnswer(
                mode=str(mode),
                task=work.name,
                pred=text,
                answers=record.answers,
                all_classes=record.all_classes,
                length=record.length,
                score=task.score(text, record.answers, record.all_classes or ()),
                prompt_tokens=len(prompt),
                density=1.0 if attention is None or attention.density is None else attention.density,
            )
        )
    return found


def _prompt(llm: LLM, work: Work, record: LongBenchRecord, length: int | None) -> list[int]:
    """The prompt of a record, whose middle is left out where it is too long; in the chat template, where there is one and the
    task is not a continuation of a text."""
    tokenizer = llm.get_tokenizer()
    text = work.prompt.format_map({"context": record.context, "input": record.input})
    chat = not work.task.plain and tokenizer.has_chat_template
    beside = len(_chat(llm, "")) if chat else 1
    most = llm.info.max_model_len - work.max_tokens
    room = min(most, length or most) - beside
    if room < 2:
        raise ConfigError(f"{work.name}: a prompt of {room + beside} tokens has no room for its text", "--length")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    while len(tokens) > room:
        # Text that is put together anew may have a few tokens more.
        half = room // 2
        text = tokenizer.decode(tokens[:half]) + tokenizer.decode(tokens[len(tokens) - half :])
        tokens, room = tokenizer.encode(text, add_special_tokens=False), room if len(tokens) > room + 8 else room - 8
    return _chat(llm, text) if chat else tokenizer.encode(text)


def _chat(llm: LLM, text: str) -> list[int]:
    """A message of the user as a prompt. Reasoning, for which an answer has no room, is switched off where that can be done."""
    formats = llm.inputs.answers
    switch = formats.efforts.switch if formats is not None else None
    options = {"chat_template_kwargs": {switch: False}} if switch else {}
    return llm.get_tokenizer().encode_chat([{"role": "user", "content": text}], **options)


def rows(answers: Iterable[LongBenchAnswer]) -> list[dict[str, Any]]:
    """Means of scores, in hundredths, by task and mode; of LongBench-E by length too. The last row of a mode is the mean of its
    tasks, each of which counts alike."""
    groups: dict[tuple[str, str], list[LongBenchAnswer]] = {}
    for answer in answers:
        groups.setdefault((answer.mode, answer.task), []).append(answer)
    found = []
    for (mode, name), group in groups.items():
        row = {"task": name, "category": TASKS[name.removesuffix(_EVEN)].category, "mode": mode} | _means(group)
        if name.endswith(_EVEN):
            row["lengths"] = dict(_by_length(group))
        found.append(row)
    for mode in dict.fromkeys(mode for mode, _ in groups):
        own = [row for row in found if row["mode"] == mode]
        means = {name: statistics.fmean(row[name] for row in own) for name in ("score", "density")}
        found.append({"task": "all", "category": "", "mode": mode, "samples": sum(row["samples"] for row in own)} | means)
    return found


def _means(group: Sequence[LongBenchAnswer]) -> dict[str, Any]:
    score, density = (statistics.fmean(getattr(one, name) for one in group) for name in ("score", "density"))
    return {"samples": len(group), "score": 100 * score, "density": density}


def _by_length(group: Sequence[LongBenchAnswer]) -> Iterable[tuple[str, float]]:
    least = 0
    for name, below in _BUCKETS:
        scores = [one.score for one in group if least <= one.length < below]
        if scores:
            yield name, 100 * statistics.fmean(scores)
        least = below


def tables(report: dict[str, Any]) -> list[Table]:
    cells = [
        [
            *(row["task"], row["category"], row["mode"], f"{row['samples']:,}", f"{row['score']:.2f}", f"{row['density']:.3f}"),
            ", ".join(f"{name} {score:.2f}" for name, score in row.get("lengths", {}).items()),
        ]
        for row in report["rows"]
    ]
    header = ["task", "category", "mode", "samples", "score", "density", "by length"]
    return [table(f"LongBench: {report['engine']['model']}", header, cells, align="lllrrrl")]
