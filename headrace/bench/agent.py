"""Agents: conversations that grow by outputs of tools and answers, start subagents and are compacted. Measures how much of
their prompts the prefix cache finds, beside what a cache without limits would.

All conversations take their turns together, a round at a time: what others compute between two turns is their pause.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.bench.options import AgentOptions
from headrace.bench.report import facts, load_average
from headrace.errors import ConfigError
from headrace.metrics.exchanges import Exchange, summary
from headrace.sampling_params import SamplingParams

if TYPE_CHECKING:
    from headrace.frontend.llm import LLM
    from headrace.outputs import RequestOutput

_FILL = 0.8
"""Share of the context at which a conversation is compacted."""
_SUMMARY = 0.1
"""Tokens of a summary, as a share of what it replaces."""
_FIRST_TOKEN = 4
"""Ids below are special tokens of most vocabularies."""


@dataclasses.dataclass
class Conversation:
    """``tokens`` are those of the prompts and answers so far."""

    tokens: list[int]
    turns: int
    """Turns that are left."""
    spawns_at: int = -1
    """Turns that are left when it starts a subagent; -1: it starts none."""


class EndlessCache:
    """The prefixes that a cache without limits would have, by digest, at multiples of ``grid`` tokens."""

    def __init__(self, grid: int) -> None:
        self.grid = grid
        self._known: set[bytes] = set()

    def found(self, tokens: Sequence[int]) -> int:
        """Returns the tokens of a prompt that need not be computed; the last one always is."""
        count = 0
        for digest in self._digests(tokens[:-1]):
            if digest not in self._known:
                break
            count += self.grid
        return count

    def add(self, tokens: Sequence[int]) -> None:
        self._known.update(self._digests(tokens))

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        running = hashlib.blake2b(digest_size=16)
        for start in range(0, len(tokens) - self.grid + 1, self.grid):
            running.update(array("q", tokens[start : start + self.grid]).tobytes())
            yield running.digest()


class Agents:
    """The traffic. The same options give the same turns; answers are the engine's own."""

    def __init__(self, options: AgentOptions, vocab_size: int, max_model_len: int, mark: int | None) -> None:
        """``mark``: the special token that begins a turn; None: turns have no marks."""
        self._rng = random.Random(options.traffic_seed)
        self._vocab_size, self._mark = vocab_size, [] if mark is None else [mark]
        self._options, self._most = options, int(_FILL * max_model_len)
        self.answer_len = self._scaled(options.answer_len)
        self._tool_lens = self._scaled(options.tool_min), self._scaled(options.tool_max)
        self._system = [*self._mark, *self._text(self._scaled(options.system_len))]
        self.compactions = self.subagents = 0
        longest = len(self._system) + self._tool_lens[1] + self.answer_len + 4
        if longest + self._most * _SUMMARY > self._most:
            raise ConfigError(
                f"a turn of {longest:,} tokens does not fit in {self._most:,}, {_FILL:.0%} of max_model_len: choose a lower "
                "--scale or a longer context",
                "--scale",
            )
        self.open = [self._begin(self._system, options.turns) for _ in range(options.conversations)]

    def _scaled(self, count: int) -> int:
        return max(1, round(count * self._options.scale))

    def _text(self, count: int) -> list[int]:
        drawn = (self._rng.randrange(_FIRST_TOKEN, self._vocab_size) for _ in range(count))
        return [_FIRST_TOKEN if token in self._mark else token for token in drawn]

    def _begin(self, tokens: list[int], turns: int) -> Conversation:
        spawns = self._rng.random() < self._options.subagents
        return Conversation(list(tokens), turns, self._rng.randrange(turns) if spawns else -1)

    def prompts(self) -> list[list[int]]:
        """The next prompt of each open conversation."""
        for one in self.open:
            added = self._text(self._rng.randint(*self._tool_lens))
            if len(one.tokens) + len(added) + self.answer_len + 4 > self._most:
                self.compactions += 1
                summary = self._text(round(_SUMMARY * len(one.tokens)))
                one.tokens = [*self._system, *self._mark, *summary]
            one.tokens += [*self._mark, *added, *self._mark]
        return [list(one.tokens) for one in self.open]

    def answered(self, answers: Sequence[Sequence[int]]) -> None:
        """Takes the answers to ``prompts``. Conversations end, and subagents of others begin: with the instructions alone, or
        with the first turn too."""
        begun = []
        for one, answer in zip(self.open, answers, strict=True):
            if one.spawns_at == one.turns:
                self.subagents += 1
                first = len(self._system) + self._tool_lens[0]
                shared = one.tokens[:first] if self._rng.random() < 0.5 else self._system
                begun.append(Conversation(list(shared), max(1, self._options.turns // 4)))
            one.tokens += answer
            one.turns -= 1
        self.open = [one for one in self.open if one.turns > 0] + begun


@dataclasses.dataclass
class Reuse:
    """Tokens of all prompts, by what became of them."""

    prompts: int = 0
    ideal: int = 0
    """Computed before, up to a multiple of the grid."""
    reused: int = 0
    """Not computed again."""
    without_kv: int = 0
    """Computed again, since their KV was gone."""
    without_state: int = 0
    """Computed again although their KV was found, since no snapshot was behind them."""

    def add(self, prompt_len: int, ideal: int, answer: AgentAnswer) -> None:
        found = min(ideal, answer.found)
        self.prompts += prompt_len
        self.ideal += ideal
        self.reused += answer.reused
        self.without_kv += max(0, ideal - max(found, answer.reused))
        self.without_state += max(0, found - answer.reused)

    def report(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompts,
            "ideal": self.ideal,
            "reused": self.reused,
            "share_of_ideal": round(self.reused / self.ideal, 4) if self.ideal else None,
            "computed": {
                "new": self.prompts - self.reused - self.without_kv - self.without_state,
                "without KV": self.without_kv,
                "without a state": self.without_state,
            },
        }


class AgentAnswer(NamedTuple):
    """One turn's answer, of any engine."""

    tokens: Sequence[int]
    reused: int
    """Tokens of the prompt that were not computed."""
    found: int
    """Those whose KV was found, at least ``reused``."""
    times: tuple[float | None, float | None]
    """Seconds until the first token and until the last."""


Generate = Callable[[list[list[int]], int], Sequence[AgentAnswer]]
"""Called with a round's prompts and the number of tokens to answer each with."""


def play(agents: Agents, grid: int, generate: Generate, *, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plays all conversations on an engine and returns what it took. ``grid``: tokens of the engine's prefixes."""
    cache, reuse, exchanges = EndlessCache(grid), Reuse(), []
    digest, spent, rounds = hashlib.blake2b(digest_size=16), 0.0, 0
    while agents.open:
        rounds += 1
        tell(f"round {rounds}: {len(agents.open)} conversations")
        prompts = agents.prompts()
        start = time.perf_counter()
        answers = generate(prompts, agents.answer_len)
        spent += time.perf_counter() - start
        ideal = [cache.found(prompt) for prompt in prompts]
        for prompt, known, answer in zip(prompts, ideal, answers, strict=True):
            reuse.add(len(prompt), known, answer)
            exchanges.append(_exchange(len(prompt), answer))
            digest.update(array("q", answer.tokens).tobytes())
            # The KV of the last token is not computed.
            cache.add([*prompt, *answer.tokens[:-1]])
        agents.answered([answer.tokens for answer in answers])
    return (
        {"rounds": rounds, "subagents": agents.subagents, "compactions": agents.compactions}
        | summary(exchanges, spent, "between tokens")
        | {"prefix_cache": reuse.report(), "answers": digest.hexdigest()}
    )


def run(llm: LLM, options: AgentOptions, *, tell: Callable[[str], None]) -> dict[str, Any]:
    """Plays all conversations and returns the report.

    Raises:
        ConfigError: the context is too short for the lengths.
    """
    load_before, info, most_snapshots = load_average(), llm.info, 0

    def generate(prompts: list[list[int]], length: int) -> list[AgentAnswer]:
        nonlocal most_snapshots
        sampling = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
        most_snapshots = max(most_snapshots, llm.stats.state_snapshots)
        return [_answer(output) for output in outputs]

    agents = Agents(options, info.vocab_size, info.max_model_len, _turn_mark(llm))
    played = play(agents, info.state_grid or info.block_size, generate, tell=tell)
    saved, skipped = dict(llm.stats.state_snapshots_saved), dict(llm.stats.state_snapshots_skipped)
    snapshots = {"most": most_snapshots, "saved": saved, "skipped": skipped}
    return {"benchmark": "agent", "model": info.model} | played | {"snapshots": snapshots} | facts(load_before)


def _turn_mark(llm: LLM) -> int | None:
    """A special token of the model's vocabulary, if it has a tokenizer."""
    tokenizer = llm.inputs.tokenizer
    return None if tokenizer is None else max(tokenizer.token_bytes.special, default=None)


def _answer(output: RequestOutput) -> AgentAnswer:
    times, reused = output.times, output.num_cached_tokens
    first, last = (None, None) if times is None else (times.first_token, times.finished)
    since = [None if end is None or times is None else end - times.arrived for end in (first, last)]
    found = reused if output.cache is None else max(reused, output.cache.attention)
    return AgentAnswer(output.outputs[0].token_ids, reused, found, (since[0], since[1]))


def _exchange(prompt_len: int, answer: AgentAnswer) -> Exchange:
    (first, last), tokens = answer.times, len(answer.tokens)
    exchange = Exchange(first, [], last, prompt_len, tokens)
    if first is not None and last is not None:
        exchange.between_tokens = [(last - first) / max(1, tokens - 1)] * (tokens - 1)
    return exchange
