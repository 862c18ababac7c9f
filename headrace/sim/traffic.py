"""Requests of a simulation: generated, or read from a trace."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.core.request import Request
from headrace.errors import ConfigError
from headrace.sampling_params import SamplingParams
from headrace.sim.config import Lengths, Traffic

_HASH_BLOCK = 512
"""Tokens of a block that Mooncake's traces name by an id."""
_MOST_TOKENS = 10_000_000


def generate(traffic: Traffic, seed: int, max_model_len: int) -> Iterator[Request]:
    """The requests in order of arrival; ``arrival_time`` counts from 0. The same seed gives the same ones."""
    rng = random.Random(seed)
    prefixes, weights = _prefixes(traffic, seed)
    at = 0.0
    for number in range(traffic.requests):
        at += rng.expovariate(traffic.rate)
        prefix = rng.choices(prefixes, cum_weights=weights)[0] if prefixes else []
        output = min(_length(rng, traffic.output_tokens), max_model_len - 1)
        room = max_model_len - output
        prompt = [*prefix, *rng.randbytes(_length(rng, traffic.input_tokens))][:room]
        session = None if traffic.sessions is None else str(rng.randrange(traffic.sessions))
        yield make_request(number, at, prompt, output, session)


def _prefixes(traffic: Traffic, seed: int) -> tuple[list[list[int]], list[float]]:
    shared = traffic.prefixes
    if shared is None:
        return [], []
    rng = random.Random(f"prefixes {seed}")
    texts = [list(rng.randbytes(shared.tokens)) for _ in range(shared.groups)]
    return texts, list(itertools.accumulate((rank + 1) ** -shared.skew for rank in range(shared.groups)))


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
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}", "--trace") from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(_traced(json.loads(line), number, seed, max_model_len))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"line {number} of {path}: {reason}", "--trace") from error
    yield from sorted(requests, key=lambda request: request.arrival_time)


def _traced(line: Any, number: int, seed: int, max_model_len: int) -> Request:
    """Raises: KeyError, ValueError, TypeError: the line is not one of a trace."""
    if not isinstance(line, dict):
        raise ValueError("it is no JSON object")
    mooncake = "timestamp" in line
    at = _number(line, "timestamp") / 1000 if mooncake else _number(line, "at")
    length = int(_number(line, "input_length" if mooncake else "input_tokens"))
    output = int(_number(line, "output_length" if mooncake else "output_tokens"))
    if not (1 <= length <= _MOST_TOKENS and 1 <= output <= _MOST_TOKENS):
        raise ValueError(f"numbers of tokens must be 1 to {_MOST_TOKENS:,}, not {length} and {output}")
    prompt: list[int] = []
    for name in line.get("hash_ids", []):
        prompt += _text(f"block {name}", min(_HASH_BLOCK, length - len(prompt)))
    if (prefix := line.get("prefix")) is not None:
        prompt = _text(f"prefix {prefix}", min(length, int(_number(line, "prefix_tokens"))))
    prompt += _text(f"rest {seed} {number}", length - len(prompt))
    output = min(output, max_model_len - 1)
    session = line.get("session")
    return make_request(number, at, prompt[: max_model_len - output], output, None if session is None else str(session))


def _number(line: dict[str, Any], name: str) -> float:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
    return value


def _text(name: str, count: int) -> list[int]:
    return list(random.Random(name).randbytes(max(0, count)))
