"""Long-document tasks with dense, elastic and sparse prompts: score, density and time to the first token."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, get_args

import msgspec

from headrace.bench.longcontext_tasks import Sample, score
from headrace.bench.report import facts, load_average, table
from headrace.choices import SparsePrefill
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError
from headrace.frontend.llm import LLM
from headrace.outputs import AttentionReport, RequestOutput
from headrace.sampling_params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from rich.table import Table

_SELECTOR: dict[str, SparsePrefill] = {"dense": "off", "elastic": "auto"}
_SELECTOR |= {name: name for name in get_args(get_args(SparsePrefill)[0]) if name not in _SELECTOR.values()}
"""Mode -> what ``sparse_prefill`` is for it."""
_WARM_UP = 256


@dataclasses.dataclass(frozen=True)
class Mode:
    """Attention of prompts: a name, and the threshold of its selector where it is not the default."""

    name: str
    threshold: float | None = None

    def __str__(self) -> str:
        return self.name if self.threshold is None else f"{self.name}:{self.threshold:g}"

    @classmethod
    def parse(cls, text: str) -> Mode:
        """``dense``, ``elastic``, ``xattn``, ``mean``, the last three also with a threshold: ``xattn:0.8``."""
        name, colon, number = text.partition(":")
        if name not in _SELECTOR:
            raise ConfigError(f"there is no mode {name!r}; there are {', '.join(_SELECTOR)}", "--modes")
        if not colon:
            return cls(name)
        if name == "dense":
            raise ConfigError("dense prompts have no threshold", "--modes")
        try:
            return cls(name, float(number))
        except ValueError:
            raise ConfigError(f"{text!r}: the threshold must be a number", "--modes") from None

    def args(self, args: EngineArgs) -> EngineArgs:
        """Returns the arguments of this mode's engine. The cache is for the second request of each prompt, which measures the
        right answer."""
        least = None if self.name == "dense" else args.sparse_min_tokens or 0
        return dataclasses.replace(
            args,
            sparse_prefill=_SELECTOR[self.name],
            sparse_threshold=self.threshold,
            sparse_min_tokens=least,
            elastic_max_exact_tokens=args.elastic_max_exact_tokens if self.name == "elastic" else None,
            enable_prefix_caching=True,
        )


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in one mode."""

    mode: str
    task: str
    length: int
    sample: int
    prompt_tokens: int
    score: float
    answer_logprob: float
    """Mean over the tokens of the right answer, each after the prompt and the tokens before it."""
    ttft: float
    density: float
    output: str
    answers: list[str]


def run(
    args: EngineArgs,
    modes: Sequence[Mode],
    samples: Sequence[Sample],
    *,
    dump: BinaryIO | None,
    tell: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs every prompt in every mode, one at a time, each mode in a separate engine.

    Args:
        dump: a line for each prompt and mode, with the density of each layer and the types of its heads.
        save: called with the report so far after each mode.

    Raises:
        ConfigError: the engine cannot run a mode, or a prompt does not fit into its context.
    """

    def measure(llm: LLM, mode: Mode) -> Iterator[Record]:
        _warm_up(llm, samples)
        for index, sample in enumerate(samples):
            tell(f"{mode}: prompt {index + 1} of {len(samples)}, {sample.task}, {len(sample.prompt):,} tokens")
            record, attention = _measure(llm, mode, sample, index)
            yield record
            if dump is not None:
                line = msgspec.to_builtins(record) | {"attention": msgspec.to_builtins(attention)}
                dump.write(json.dumps(line).encode() + b"\n")
                dump.flush()

    # A model without a router refuses elastic: before the others have taken their time.
    ordered = sorted(modes, key=lambda mode: mode.name != "elastic")
    return by_mode("longcontext", args, ordered, measure, lambda records: rows(records, modes), tell=tell, save=save)


def by_mode(
    benchmark: str,
    args: EngineArgs,
    modes: Sequence[Mode],
    measure: Callable[[LLM, Mode], Iterable[Any]],
    rows: Callable[[Sequence[Any]], list[dict[str, Any]]],
    *,
    tell: Callable[[str], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Measures each mode in a separate engine and returns the report, which ``save`` has had after each mode."""
    load_before = load_average()
    report: dict[str, Any] = {}
    requests: list[Any] = []
    for mode in modes:
        tell(f"{mode}: starting the engine")
        with LLM(**vars(mode.args(args))) as llm:
            requests += measure(llm, mode)
            engine = {name: getattr(llm.info, name) for name in ("model", "dtype", "quantization", "device", "max_model_len")}
        report = {
            "benchmark": benchmark,
            "engine": engine,
            "rows": rows(requests),
            "requests": msgspec.to_builtins(requests),
            "load_after": load_average(),
        } | facts(load_before)
        save(report)
    return report


def _warm_up(llm: LLM, samples: Sequence[Sample]) -> None:
    """A short prompt, whose time does not count, once it is clear that all of them fit."""
    most = llm.info.max_model_len
    for sample in samples:
        if len(sample.prompt) + max(sample.max_tokens, _limit(sample)) > most:
            raise ConfigError(f"{sample.task}: {sample.length} tokens and an answer exceed the context of {most}", "--lengths")
    _one(llm, samples[0].prompt[:_WARM_UP], SamplingParams(temperature=0.0, max_tokens=1))


def _limit(sample: Sample) -> int:
    """Tokens that the right answer takes at most."""
    return len(sample.target.encode())


def _measure(llm: LLM, mode: Mode, sample: Sample, index: int) -> tuple[Record, AttentionReport | None]:
    """Generates the answer greedily, then the right one, which a constraint holds the engine to.

    The right answer is decoded, and not part of the prompt: generated tokens attend densely, a prompt's would not.
    """
    llm.reset_prefix_cache()
    output = _one(llm, sample.prompt, SamplingParams(temperature=0.0, max_tokens=sample.max_tokens))
    if mode.name != "dense" and output.attention is None:
        why = "the model has no router" if mode.name == "elastic" else "--sparse-min-tokens is larger"
        raise ConfigError(f"{mode}: a prompt of {len(sample.prompt)} tokens attends densely: {why}", "--modes")
    right = _one(
        llm,
        sample.prompt,
        SamplingParams(
            temperature=0.0,
            max_tokens=_limit(sample),
            logprobs=0,
            structured_outputs=StructuredOutputsParams(choice=[sample.target]),
        ),
    ).outputs[0]
    if right.text != sample.target:
        raise EngineError(f"the constraint {sample.target!r} was answered by {right.text!r}")
    # The constraint ends with the last token of the answer: none of them is an end of sequence.
    tokens = [entry[token].logprob for entry, token in zip(right.logprobs or [], right.token_ids, strict=True)]
    text = output.outputs[0].text
    return (
        Record(
            mode=str(mode),
            task=sample.task,
            length=sample.length,
            sample=index,
            prompt_tokens=len(sample.prompt),
            score=score(sample, text),
            answer_logprob=statistics.fmean(tokens),
            ttft=_ttft(output),
            density=1.0 if output.attention is None or output.attention.density is None else output.attention.density,
            output=text,
            answers=sample.answers,
        ),
        output.attention,
    )


def _one(llm: LLM, prompt: list[int], params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    if output.error:
        raise EngineError(output.error)
    return output


def _ttft(output: RequestOutput) -> float:
    times = output.times
    if times is None or times.first_token is None:
        raise EngineError("a request has finished without a first token")
    return times.first_token - times.arrived


def rows(records: Sequence[Record], modes: Sequence[Mode]) -> list[dict[str, Any]]:
    """Returns means, and the median time to the first token, by task, length and mode."""
    groups: dict[tuple[str, int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.task, record.length, record.mode), []).append(record)
    found = []
    for task, length in dict.fromkeys((task, length) for task, length, _ in groups):
        for mode in map(str, modes):
            if group := groups.get((task, length, mode)):
                means = {name: statistics.fmean(getattr(one, name) for one in group) for name in _MEANS}
                ttft = statistics.median(one.ttft for one in group)
                found.append({"task": task, "length": length, "mode": mode, "samples": len(group)} | means | {"ttft": ttft})
    return found


_MEANS = ("score", "answer_logprob", "density")


def tables(report: dict[str, Any]) -> list[Table]:
    dense = {(row["task"], row["length"]): row for row in report["rows"] if row["mode"] == "dense"}
    cells = []
    for row in report["rows"]:
        base = dense.get((row["task"], row["length"]))
        cells.append(
            [
                *(row["task"], f"{row['length']:,}", row["mode"], str(row["samples"])),
                *(f"{row['score']:.2f}", f"{row['answer_logprob']:.3f}", f"{row['density']:.3f}", f"{row['ttft']:.2f}"),
                "" if base is None else f"{base['ttft'] / row['ttft']:.2f}x",
            ]
        )
    header = ["task", "length", "mode", "samples", "score", "log p of the answer", "density", "TTFT, s", "dense TTFT / TTFT"]
    return [table(f"Long documents: {report['engine']['model']}", header, cells, align="lrl" + "r" * 6)]
