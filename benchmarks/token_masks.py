"""Host time of a step's token masks: ``python benchmarks/token_masks.py TOKENIZER [--rows 256]``.

Each row is somewhere in a JSON document of one of four schemas. Reports the median milliseconds of what the engine does between
the result of one step and the launch of the next step's sampling, and of processor time, all threads together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from headrace.constrain.compiler import GrammarCompiler
from headrace.constrain.constraints import Constraints
from headrace.constrain.factory import GrammarFactory
from headrace.constrain.vocabulary import GrammarVocabulary
from headrace.core.plan import SamplePlan
from headrace.option_groups import StructuredOutputsConfig
from headrace.sampling.masks import HostMasks
from headrace.sampling_params import StructuredOutputsParams
from headrace.text.tokenizer import Tokenizer

NAME = {"type": "string", "maxLength": 40}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": NAME, "age": {"type": "integer"}}, "required": ["name", "age"]},
    {"type": "object", "properties": {"tags": {"type": "array", "items": NAME, "minItems": 4}}, "required": ["tags"]},
    {"type": "object", "properties": {"kind": {"enum": ["a", "b", "other"]}, "text": {"type": "string"}}, "required": ["text"]},
    {"type": "object", "properties": {"at": {"type": "string", "format": "date-time"}, "n": {"type": "number"}}},
]


WORDS = ["the", "river", "runs", "north", "of", "an", "old", "town", "where", "people", "trade", "salt,", "cloth", "week"]


def document(kind: int, rng: random.Random) -> Any:
    """An instance of a schema."""

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    return [
        {"name": text(4), "age": rng.randint(0, 99)},
        {"tags": [text(2) for _ in range(rng.randint(4, 12))]},
        {"kind": rng.choice(["a", "b", "other"]), "text": text(60)},
        {"at": "2026-02-03T04:05:06Z", "n": rng.random() * 1e4},
    ][kind]


class Row:
    """Attributes of a sequence that Constraints reads."""

    def __init__(self, seq_id: int, matcher: Any, tokenizer: Tokenizer, rng: random.Random) -> None:
        self.seq_id, self.matcher, self.finished = seq_id, matcher, False
        self.left: list[int] = []
        self._tokenizer, self._rng = tokenizer, rng

    def token(self) -> int:
        """The next token of the row's document."""
        if not self.left:
            text = json.dumps(document(self.seq_id % len(SCHEMAS), self._rng))
            self.left = self._tokenizer.encode(text, add_special_tokens=False)[::-1]
        return self.left.pop()


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", help="folder with tokenizer.json")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(given.tokenizer, local_files_only=True))
    size = len(tokenizer.token_bytes.pieces)
    vocabulary = GrammarVocabulary(tokenizer, size)
    config = StructuredOutputsConfig()
    factory, compiler = GrammarFactory(config, vocabulary), GrammarCompiler(vocabulary, config)
    compiled = [compiler.compile(factory.constraint(StructuredOutputsParams(json=schema)))[0].result() for schema in SCHEMAS]
    rng = random.Random(0)
    rows = [Row(index, compiled[index % len(compiled)].copy(), tokenizer, rng) for index in range(given.rows)]
    constraints = Constraints(compiler, size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("advance", "masks", "plan", "upload")}
    ids = np.arange(given.rows)
    for step in range(given.steps):
        marks = [now()]
        seq_ids, masks, failed = constraints.masks([(row, ()) for row in rows])  # type: ignore[misc]
        assert not failed
        marks.append(now())
        plan = SamplePlan(step, seq_ids, masks.data.cast("B"))
        marks.append(now())
        made = HostMasks.of(plan, ids, size)
        sent = None if made is None else made.upload(device)
        marks.append(now())
        assert sent is not None
        drawn = [row.token() for row in rows]
        marks.append(now())
        for row, token in zip(rows, drawn, strict=True):
            if (error := row.matcher.advance([token])) is not None:
                raise SystemExit(f"the document is not of its schema: {error}")
            if not row.left:
                row.matcher = compiled[row.seq_id % len(compiled)].copy()
        marks.append(now())
        parts = itertools.pairwise(marks)
        for name, (before, after) in zip(("masks", "plan", "upload", "draw", "advance"), parts, strict=True):
            if name in times:
                times[name].append((1e3 * (after[0] - before[0]), 1e3 * (after[1] - before[1])))
    report: dict[str, Any] = {"rows": given.rows, "vocab": size, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    for place, kind in enumerate(("wall_ms", "cpu_ms")):
        report[kind] = {name: round(statistics.median(pair[place] for pair in each[5:]), 2) for name, each in times.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
