"""Long-document tasks: documents of a given length in tokens with a question at the end, and how answers are scored.

The tasks follow RULER (2404.06654). Their text is headrace's own, and the same for the same seed and tokenizer.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import re
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from headrace.bench.texts import PROSE
from headrace.bench.workloads import Encoder
from headrace.errors import ConfigError
from headrace.host.user_files import MAX_BYTES, open_input

DATA = "data"
"""Name of the task that a file defines."""
_SENTENCES = re.findall(r"[^.]+\.", " ".join(PROSE.split()))
_IN_TEXT = sorted({word.lower() for word in re.findall(r"\b[A-Za-z]{4,9}\b", PROSE)})
_WORDS = [word for word in _IN_TEXT if not any(word in other for other in _IN_TEXT if other != word)]
"""None is part of another, so that a word found in an answer is this word."""
_KEYS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "ivory", "jade", "kestrel", "lagoon", "maple")
_KEYS_IN_TEXT = 8
_HOPS = 4
_COMMON = 5
_DATA_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Sample:
    """One document with its question."""

    task: str
    length: int
    """Tokens that were asked for; the prompt has at most as many."""
    prompt: list[int]
    answers: list[str]
    target: str
    """The right continuation of the prompt, whose log-probability is measured."""
    max_tokens: int
    """Tokens to generate for the answer."""
    measure: Literal["found", "f1"] = "found"


class DocumentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a file in LongBench's format."""

    context: str
    input: str
    answers: Annotated[list[Annotated[str, msgspec.Meta(pattern=r"\S")]], msgspec.Meta(min_length=1)]


_AnyRecord = TypeVar("_AnyRecord", bound=DocumentRecord)


@dataclasses.dataclass(frozen=True)
class _Document:
    """The parts of a document. ``needles`` stand at random places between pieces of the filler, in their order."""

    head: str
    filler: Iterator[str]
    needles: list[str]
    tail: str
    answers: list[str]
    max_tokens: int


def _haystack(rng: random.Random) -> Iterator[str]:
    """Sentences without end: all of the text's, each time in another order."""
    while True:
        yield from (f" {sentence.strip()}" for sentence in rng.sample(_SENTENCES, len(_SENTENCES)))


def _needles(rng: random.Random, keys: int) -> _Document:
    chosen = rng.sample(_KEYS, keys)
    numbers = [str(number) for number in rng.sample(range(1_000_000, 10_000_000), keys)]
    return _Document(
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about "
        "the numbers afterwards.\n",
        _haystack(rng),
        [f" One of the special magic numbers for {key} is: {number}." for key, number in zip(chosen, numbers, strict=True)],
        f"\nWhat is the special magic number for {chosen[0]} mentioned in the provided text? The special magic number for "
        f"{chosen[0]} mentioned in the provided text is",
        numbers[:1],
        16,
    )


def _shuffled_needles(rng: random.Random) -> _Document:
    document = _needles(rng, _KEYS_IN_TEXT)
    return dataclasses.replace(document, needles=rng.sample(document.needles, _KEYS_IN_TEXT))


def _variables(rng: random.Random) -> _Document:
    names = ["".join(rng.sample(string.ascii_uppercase, 5)) for _ in range(_HOPS + 1)]
    value = rng.randint(10_000, 99_999)
    chain = [f" VAR {names[0]} = {value}.", *(f" VAR {new} = VAR {old}." for old, new in itertools.pairwise(names))]
    return _Document(
        "Memorize and track the chain of variable assignment hidden in the following text.\n",
        _haystack(rng),
        chain,
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the chain "
        f"of variable assignment in the text above, {len(names)} variables are assigned the value {value}, they are:",
        names,
        40,
    )


def _common_words(rng: random.Random) -> _Document:
    words = rng.sample(_WORDS, len(_WORDS))
    common, others = words[:_COMMON], words[_COMMON:]

    def listed() -> Iterator[str]:
        """Every second word is one of the common ones."""
        while True:
            for index, other in enumerate(rng.sample(others, len(others))):
                pair = [common[index % _COMMON], other]
                yield "".join(f" {word}" for word in rng.sample(pair, 2))

    return _Document(
        "Below is a list of words. In it, some words appear much more often than the others. Memorize those.\n",
        listed(),
        [],
        f"\nQuestion: What are the {_COMMON} most common words in the above list? Answer: The top {_COMMON} words that appear "
        "most often in the list are:",
        common,
        24,
    )


TASKS: dict[str, Callable[[random.Random], _Document]] = {
    "needle": lambda rng: _needles(rng, 1),
    "multikey": _shuffled_needles,
    "variables": _variables,
    "words": _common_words,
}


def build(encoder: Encoder, task: str, length: int, index: int, seed: int) -> Sample:
    """Sample number ``index`` of a task: a prompt of ``length`` tokens, or as many fewer as no piece of the filler has.

    Raises:
        ConfigError: there is no such task, or the length has no room for its question.
    """
    if task not in TASKS:
        raise ConfigError(f"there is no task {task!r}; there are {', '.join(TASKS)}", "--tasks")
    rng = random.Random(f"{seed}/{task}/{length}/{index}")
    document = TASKS[task](rng)
    # Parts are tokenised one by one, so that the length is exact whatever stands beside them.
    head, tail = encoder.encode(document.head), encoder.encode(document.tail, add_special_tokens=False)
    needles = [encoder.encode(needle, add_special_tokens=False) for needle in document.needles]
    room = length - len(head) - len(tail) - sum(map(len, needles))
    pieces: list[list[int]] = []
    for text in document.filler:
        piece = encoder.encode(text, add_special_tokens=False)
        if len(piece) > room:
            break
        pieces.append(piece)
        room -= len(piece)
    if len(pieces) < max(1, len(needles)):
        raise ConfigError(f"{length} tokens are too few for the task {task}", "--lengths")
    # From the last place to the first: an insertion leaves the places before it as they are.
    places = sorted(rng.sample(range(len(pieces)), len(needles)), reverse=True)
    for place, needle in zip(places, reversed(needles), strict=True):
        pieces.insert(place, needle)
    prompt = [*head, *itertools.chain.from_iterable(pieces), *tail]
    return Sample(task, length, prompt, document.answers, " " + ", ".join(document.answers), document.max_tokens)


def read_records(path: Path, kind: type[_AnyRecord], count: int | None, option: str) -> list[_AnyRecord]:
    """The first ``count`` lines of a JSONL file, or all.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is not such object; names the line.
    """
    found = []
    with open_input(path, option) as file:
        lines = iter(lambda: file.readline(MAX_BYTES), b"")
        for number, line in enumerate(itertools.islice(lines, count), start=1):
            try:
                found.append(msgspec.json.decode(line, type=kind))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ConfigError(f"line {number} of {path} is not a record of LongBench: {error}", option) from error
    if not found:
        raise ConfigError(f"{path} has no records", option)
    return found


def read_data(encoder: Encoder, path: Path, length: int, count: int) -> list[Sample]:
    """The first ``count`` lines of a file in LongBench's format; the middle of a longer context is left out."""
    records = enumerate(read_records(path, DocumentRecord, count, "--data"), start=1)
    return [_sample(encoder, record, length, f"line {number} of {path}") for number, record in records]


def _sample(encoder: Encoder, record: DocumentRecord, length: int, where: str) -> Sample:
    body = encoder.encode(record.context)
    tail = encoder.encode(f"\n\nQuestion: {record.input}\nAnswer:", add_special_tokens=False)
    room = length - len(tail)
    if room < 2:
        raise ConfigError(f"{where}: the question alone has {len(tail)} tokens, of a length of {length}", "--lengths")
    if len(body) > room:
        body = body[: room // 2] + body[len(body) - (room - room // 2) :]
    return Sample(DATA, length, body + tail, record.answers, f" {record.answers[0].strip()}", _DATA_TOKENS, "f1")


def score(sample: Sample, text: str) -> float:
    """Scores a generated answer, 0 to 1: the share of the right answers that it contains, or the best F1 of its words."""
    if sample.measure == "found":
        return sum(answer.lower() in text.lower() for answer in sample.answers) / len(sample.answers)
    return max(f1(words(text), words(answer)) for answer in sample.answers)


def words(text: str) -> list[str]:
    """Returns the words that SQuAD's and LongBench's F1 count: without case, punctuation and articles."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return [word for word in bare.split() if word not in ("a", "an", "the")]


def f1(given: Sequence[str], right: Sequence[str]) -> float:
    common = sum((collections.Counter(given) & collections.Counter(right)).values())
    return 2 * common / (len(given) + len(right)) if common else 0.0
