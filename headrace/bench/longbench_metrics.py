"""LongBench's tasks and metrics, after the definitions that its authors published (2308.14508)."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from headrace.bench.longcontext_tasks import f1, words
from headrace.errors import ConfigError

Metric = Callable[[str, str, Sequence[str]], float]
"""Score, 0 to 1, of an answer against one right answer, given the classes of the task."""
_CODE_MARKS = ("`", "#", "//")
"""Marks of lines that are not code: fences and comments."""


def _f1(answer: str, right: str, classes: Sequence[str]) -> float:
    return f1(words(answer), words(right))


def _f1_chinese(answer: str, right: str, classes: Sequence[str]) -> float:
    return f1(_chinese_words(answer), _chinese_words(right))


def _rouge(answer: str, right: str, classes: Sequence[str]) -> float:
    """F of ROUGE-L, as the package rouge computes it."""
    rouge = _package("rouge").Rouge(metrics=["rouge-l"])
    try:
        return float(rouge.get_scores([answer], [right], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):  # An answer without a word, or one longer than its recursion reaches.
        return 0.0


def _rouge_chinese(answer: str, right: str, classes: Sequence[str]) -> float:
    cut = _package("jieba").lcut
    return _rouge(" ".join(cut(answer)), " ".join(cut(right)), classes)


def _classification(answer: str, right: str, classes: Sequence[str]) -> float:
    """The share that the right class has of the classes in the answer; those that are part of its name do not count."""
    named = [name for name in classes if name in answer and (name == right or name not in right)]
    return 1 / len(named) if right in named else 0.0


def _count(answer: str, right: str, classes: Sequence[str]) -> float:
    """The share of the numbers in the answer that are the right one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(right) / len(numbers) if numbers else 0.0


def _retrieval(answer: str, right: str, classes: Sequence[str], *, name: str) -> float:
    """Counts like ``_count``; the right answer is a name and a number."""
    found = re.search(rf"{name}(\d+)", right)
    return 0.0 if found is None else _count(answer, found[1], classes)


def _code_similarity(answer: str, right: str, classes: Sequence[str]) -> float:
    """Similarity of the first line of code, in whole hundredths."""
    lines = (line for line in answer.lstrip("\n").split("\n") if not any(mark in line for mark in _CODE_MARKS))
    line = next(lines, "")
    return round(100 * difflib.SequenceMatcher(None, line, right).ratio()) / 100 if line and right else 0.0


def _chinese_words(text: str) -> list[str]:
    found = ("".join(filter(_counts, word.lower())) for word in _package("jieba").lcut(text))
    return [word for word in found if word]


def _counts(character: str) -> bool:
    """Whether a character is none of ASCII's punctuation, of another punctuation, or of the spaces."""
    wide = unicodedata.normalize("NFKC", character)
    return not (wide.isspace() or wide in string.punctuation or unicodedata.category(character).startswith("P"))


@functools.cache
def _package(name: str) -> Any:
    """Raises: ConfigError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"the metric of this task needs the package {name}: pip install 'headrace[longbench]'", "--tasks"
        ) from None


@dataclasses.dataclass(frozen=True)
class LongBenchTask:
    category: str
    metric: Metric
    plain: bool = False
    """The prompt has no chat template, as it shows examples of answers or is code."""
    first_line: bool = False
    """The first line of the answer alone counts."""
    one_line: bool = False
    """The answer ends with its first line."""
    packages: tuple[str, ...] = ()

    def score(self, answer: str, right: Sequence[str], classes: Sequence[str]) -> float:
        """The best score against any of the right answers, 0 to 1."""
        if self.first_line:
            answer = answer.lstrip("\n").split("\n")[0]
        return max(self.metric(answer, one, classes) for one in right)

    def check_packages(self) -> None:
        """Raises: ConfigError: a package of its metric is not installed."""
        for name in self.packages:
            _package(name)


_ROUGE, _JIEBA = ("rouge",), ("jieba",)
TASKS = {
    "narrativeqa": LongBenchTask("one document", _f1),
    "qasper": LongBenchTask("one document", _f1),
    "multifieldqa_en": LongBenchTask("one document", _f1),
    "multifieldqa_zh": LongBenchTask("one document", _f1_chinese, packages=_JIEBA),
    "hotpotqa": LongBenchTask("several documents", _f1),
    "2wikimqa": LongBenchTask("several documents", _f1),
    "musique": LongBenchTask("several documents", _f1),
    "dureader": LongBenchTask("several documents", _rouge_chinese, packages=_ROUGE + _JIEBA),
    "gov_report": LongBenchTask("summary", _rouge, packages=_ROUGE),
    "qmsum": LongBenchTask("summary", _rouge, packages=_ROUGE),
    "multi_news": LongBenchTask("summary", _rouge, packages=_ROUGE),
    "vcsum": LongBenchTask("summary", _rouge_chinese, packages=_ROUGE + _JIEBA),
    "trec": LongBenchTask("few shots", _classification, plain=True, first_line=True),
    "triviaqa": LongBenchTask("few shots", _f1, plain=True, first_line=True),
    "samsum": LongBenchTask("few shots", _rouge, plain=True, first_line=True, one_line=True, packages=_ROUGE),
    "lsht": LongBenchTask("few shots", _classification, plain=True, first_line=True),
    "passage_count": LongBenchTask("synthetic", _count),
    "passage_retrieval_en": LongBenchTask("synthetic", functools.partial(_retrieval, name="Paragraph ")),
    "passage_retrieval_zh": LongBenchTask("synthetic", functools.partial(_retrieval, name="段落")),
    "lcc": LongBenchTask("code", _code_similarity, plain=True),
    "repobench-p": LongBenchTask("code", _code_similarity, plain=True),
}
