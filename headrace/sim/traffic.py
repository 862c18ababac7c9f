"""Requests of a simulation: generated, or read from a trace."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.request import Request
from headrace.errors import ConfigError
from headrace.host.user_files import open_input
from headrace.options import shown
from headrace.sampling_params import SamplingParams
from headrace.sim.config import MOST_REQUESTS, MOST_TOKENS, Lengths, Prefixes, Traffic

_HASH_BLOCK = 512
"""Tokens of a block that Mooncake's traces name by an id."""
_LINE_BYTES = 2**20
"""Limit of a line of a trace."""


def generate(traffic: Traffic, seed: int, max_model_len: int) -> Iterator[Request]:
    """The requests in order of arrival; ``arrival_time`` counts from 0. The same seed gives the same ones."""
    rng = random.Random(seed)
    groups, weights = _groups(traffic.prefixes)
    at = 0.0
    for number in range(traffic.requests):
        at += rng.expovariate(traffic.rate)
        prefix = b""
        if traffic.prefixes is not None:
            (group,) = rng.choices(groups, cum_weights=weights)
            prefix = random.Random(f"prefix {group} {seed}").randbytes(min(traffic.prefixes.tokens, max_model_len))
        output = min(_length(rng, traffic.output_tokens), max_model_len - 1)
        room = max_model_len - output
        rest = min(_length(rng, traffic.input_tokens), max_model_len)
        prompt = [*(prefix + rng.randbytes(rest))[:room]]
        session = None if traffic.sessions is None else str(rng.randrange(traffic.sessions))
        yield make_request(number, at, prompt, output, session)


def _groups(shared: Prefixes | None) -> tuple[range, list[float]]:
    """The numbers of the prefixes, and their cumulative weights."""
    groups = range(0 if shared is None else shared.groups)
    skew = 0.0 if shared is None else shared.skew
    return groups, list(itertools.accumulate((rank + 1) ** -skew for rank in groups))


def _length(rng: random.Random, lengths: Lengths) -> int:
    return max(1, min(lengths.max, round(lengths.median * math.exp(lengths.sigma * rng.gauss(0.0, 1.0)))))


def make_request(number: int, at: float, prompt: list[int], output: int, session: str | None = None) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    return Request(
        request_id=f"request-{number}",
        prompt_token_ids=prompt,
        sampling=sampling,
        max_tokens=output,
        seed=number,
        session=session,
        arrival_time=at,
    )


def read_trace(path: str | Path, seed: int, max_model_len: int) -> Iterator[Request]:
    """The requests of a JSONL file, in order of arrival.

    A line has ``at`` (seconds), ``input_tokens`` and ``output_tokens``, and may have ``prefix`` (a name: prompts with the same
    one begin alike) with ``prefix_tokens``, and ``session``. Lines of Mooncake's traces are read too: ``timestamp``
    (milliseconds), ``input_length``, ``output_length`` and ``hash_ids``. Prompts are cut to what the context holds.

    Raises:
        ConfigError: the file cannot be read, or a line is something else; names the line.
    """
    traced = []
    with open_input(Path(path), "--trace") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES + 1), b""), start=1):
            try:
                if number > MOST_REQUESTS:
                    raise ValueError(f"a trace has at most {MOST_REQUESTS:,} lines")
                if len(line) > _LINE_BYTES:
                    raise ValueError(f"it has more than {_LINE_BYTES:,} bytes")
                if not line.isspace():
                    traced.append(_traced(json.loads(line), number))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                raise ConfigError(f"line {number} of {path}: {reason}", "--trace") from error
    traced.sort(key=lambda one: one.at)
    return (one.request(seed, max_model_len) for one in traced)


class _Traced(NamedTuple):
    """A line of a trace. Its prompt is made when it arrives: those of all lines would not fit into memory."""

    at: float
    number: int
    input_tokens: int
    output_tokens: int
    blocks: Sequence[Any]
    """Names of the prompt's first blocks."""
    prefix: tuple[str, int] | None
    """Name, and number of tokens."""
    session: str | None

    def request(self, seed: int, max_model_len: int) -> Request:
        output = min(self.output_tokens, max_model_len - 1)
        length = min(self.input_tokens, max_model_len - output)
        prompt: list[int] = []
        for name in self.blocks[: -(-length // _HASH_BLOCK)]:
            prompt += _text(f"block {name}", min(_HASH_BLOCK, length - len(prompt)))
        if self.prefix is not None:
            prompt = _text(f"prefix {self.prefix[0]}", min(length, self.prefix[1]))
        prompt += _text(f"rest {seed} {self.number}", length - len(prompt))
        return make_request(self.number, self.at, prompt, output, self.session)


def _traced(line: Any, number: int) -> _Traced:
    """Raises: KeyError, ValueError, TypeError: the line is not one of a trace."""
    if not isinstance(line, dict):
        raise ValueError("it is not JSON object")
    mooncake = "timestamp" in line
    at = _number(line, "timestamp") / 1000 if mooncake else _number(line, "at")
    length = int(_number(line, "input_length" if mooncake else "input_tokens"))
    output = int(_number(line, "output_length" if mooncake else "output_tokens"))
    if not (1 <= length <= MOST_TOKENS and 1 <= output <= MOST_TOKENS):
        raise ValueError(f"numbers of tokens must be 1 to {MOST_TOKENS:,}, not {length} and {output}")
    blocks = line.get("hash_ids", [])
    if not isinstance(blocks, list):
        raise TypeError(f"hash_ids must be a list, not {shown(blocks)}")
    prefix = line.get("prefix")
    shared = None if prefix is None else (str(prefix), int(_number(line, "prefix_tokens")))
    session = line.get("session")
    return _Traced(at, number, length, output, blocks, shared, None if session is None else str(session))


def _number(line: dict[str, Any], name: str) -> float:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ValueError(f"{name} must be a number of at least 0, not {shown(value)}")
    return value


def _text(name: str, count: int) -> list[int]:
    return list(random.Random(name).randbytes(max(0, count)))
