"""StepTimeModel: how long a step takes, as a function of its plan."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headrace.core.plan import StepPlan
from headrace.options import shown

StepKind = Literal["decode", "mixed"]
Duration = Annotated[float, Meta(ge=0, le=3600)]
"""Seconds of a step, or of what it has of something."""
Sizes = tuple[Annotated[int, Meta(ge=0)], ...]
KINDS: tuple[StepKind, ...] = ("decode", "mixed")
PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
"""Probabilities of the quantiles that a ``KindTimes`` keeps of its residuals. The first and the last are not quantiles: values
between them and their neighbours are sampled evenly, with the mean of the measured ones, which a single outlier would put
wrong."""
_OF_PROBABILITIES = Meta(min_length=len(PROBABILITIES), max_length=len(PROBABILITIES))


class GraphSizes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sizes of captured steps, rising. A step is padded to the next one; a step beyond them is launched kernel by kernel."""

    rows: Sizes = ()
    """Decode rows of steps without prompts. Empty: nothing is captured."""
    rows_beside: Sizes = ()
    """Decode rows of steps with prompts."""
    prompt_tokens: Sizes = ()
    max_prompts: Annotated[int, Meta(ge=0)] = 0
    """Prompts of a captured step, at most."""

    def __post_init__(self) -> None:
        for sizes in (self.rows, self.rows_beside, self.prompt_tokens):
            _check_rising(sizes)

    def limited(self, max_num_seqs: int, max_num_batched_tokens: int) -> GraphSizes:
        """Returns the sizes of the same engine with limits that are at most as high."""
        tokens = tuple(size for size in self.prompt_tokens if size <= max_num_batched_tokens)
        return GraphSizes(_limited(self.rows, max_num_seqs), _limited(self.rows_beside, max_num_seqs), tokens, self.max_prompts)


def _check_rising(numbers: Sequence[float]) -> None:
    if any(low >= high for low, high in itertools.pairwise(numbers)):
        raise ValueError(f"numbers must rise: {shown(list(numbers))}")


def _limited(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The limit itself is captured too."""
    return (*sizes[: bisect_left(sizes, most)], most) if sizes and most < sizes[-1] else sizes


NO_GRAPHS = GraphSizes()


class StepFeatures(NamedTuple):
    """Properties of a step on which its time depends."""

    decode_rows: int
    """Padded to the captured size where the step is replayed, as ``prefill_tokens``."""
    context_tokens: int
    """Tokens whose KV the decode rows read."""
    prefill_tokens: int
    prefill_context: int
    """Sum over prompt tokens of the tokens whose KV each reads."""
    eager: bool = False
    """The step is launched kernel by kernel, while other steps are replayed."""

    @property
    def kind(self) -> StepKind:
        return "mixed" if self.prefill_tokens else "decode"

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.prefill_tokens


def features(plan: StepPlan, graphs: GraphSizes = NO_GRAPHS) -> StepFeatures:
    decode, prefill = plan.rows[: plan.num_decode_rows], plan.rows[plan.num_decode_rows :]
    rows, tokens = len(decode), plan.num_tokens - sum(row.num_tokens for row in decode)
    padded_rows = _padded(graphs.rows_beside if prefill else graphs.rows, rows)
    padded_tokens = _padded(graphs.prompt_tokens, tokens) if tokens and len(prefill) <= graphs.max_prompts else None
    replayed = padded_rows is not None and (padded_tokens is not None or not prefill)
    reads = [row.num_tokens * row.num_computed + row.num_tokens * (row.num_tokens + 1) // 2 for row in prefill]
    if plan.layers is not None:
        reads[-1] = plan.layers.share(reads[-1])
    return StepFeatures(
        padded_rows if replayed and padded_rows is not None else rows,
        sum(row.num_computed + row.num_tokens for row in decode),
        padded_tokens if replayed and padded_tokens is not None else tokens,
        sum(reads),
        bool(graphs.rows) and not replayed,
    )


def _padded(sizes: tuple[int, ...], count: int) -> int | None:
    """None: there is no size so large."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


class Curve(msgspec.Struct, frozen=True):
    """Linear between its knots, which rise, and beyond them as between the last two."""

    knots: Annotated[list[float], Meta(min_length=1)]
    values: list[Duration]

    def __post_init__(self) -> None:
        _check_rising(self.knots)
        if len(self.values) != len(self.knots):
            raise ValueError(f"a curve has {len(self.knots)} knots and {len(self.values)} values")

    def __call__(self, at: float) -> float:
        knots, values = self.knots, self.values
        if len(knots) == 1:
            return values[0]
        right = min(max(bisect_left(knots, at), 1), len(knots) - 1)
        share = (at - knots[right - 1]) / (knots[right] - knots[right - 1])
        # Times do not become negative: the curve is constant below its first knot, and beyond its last one where it falls.
        share = max(share, 0.0) if values[right] >= values[right - 1] else min(max(share, 0.0), 1.0)
        return values[right - 1] * (1.0 - share) + values[right] * share


class KindTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of the steps of one kind."""

    base: Curve
    """Time by the step's tokens, those of decode rows included."""
    context: Duration
    """Per token read by decode rows."""
    row: Duration = 0.0
    """Per decode row of a mixed step, beside its part in ``base``."""
    prefill_context: Duration = 0.0
    """Per token read by prompt tokens."""
    residuals: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e6)], ...], _OF_PROBABILITIES] = (1.0,) * len(PROBABILITIES)
    """Quantiles of measured by estimated time, for ``PROBABILITIES``."""

    def mean(self, step: StepFeatures) -> float:
        return (
            self.base(step.tokens)
            + self.context * step.context_tokens
            + (self.row * step.decode_rows if step.prefill_tokens else 0.0)
            + self.prefill_context * step.prefill_context
        )

    def factor(self, probability: float) -> float:
        right = max(1, bisect_left(PROBABILITIES, probability))
        low, high = PROBABILITIES[right - 1], PROBABILITIES[right]
        share = (probability - low) / (high - low)
        return self.residuals[right - 1] * (1.0 - share) + self.residuals[right] * share


class StepTimeModel(msgspec.Struct, frozen=True):
    """Seconds that the device and the host spend on a step. At most 50 numbers.

    A step without prompt tokens is of the kind ``decode``, another ``mixed``.
    """

    decode: KindTimes
    mixed: KindTimes
    host_step: Duration = 0.0
    """Seconds of a step on the host, before its launch and after its result together."""
    host_row: Duration = 0.0
    """Seconds of each row on the host."""
    host_start: Duration = 0.0
    """Host time for each sequence that a step starts, from its request's arrival in the engine on."""
    host_end: Duration = 0.0
    """Host time for each sequence that ends with a step."""
    host_prompt: Duration = 0.0
    """Host time for each prompt token."""
    host_eager: Duration = 0.0
    """Host time to launch a step kernel by kernel, while the device already runs it."""
    graphs: GraphSizes = NO_GRAPHS

    def limited(self, max_num_seqs: int, max_num_batched_tokens: int) -> StepTimeModel:
        """Returns the times of the same engine with limits that are at most as high."""
        return msgspec.structs.replace(self, graphs=self.graphs.limited(max_num_seqs, max_num_batched_tokens))

    def times(self, kind: StepKind) -> KindTimes:
        return self.decode if kind == "decode" else self.mixed

    def device_seconds(self, plan: StepPlan, random: random.Random | None = None) -> float:
        """``random``: samples a residual; None: the estimate without one."""
        if not plan.rows:
            return 0.0
        step = features(plan, self.graphs)
        times = self.times(step.kind)
        seconds = times.mean(step)
        return seconds if random is None else seconds * times.factor(random.random())

    def launch_seconds(self, plan: StepPlan) -> float:
        """Returns the host's time until the device begins with the step."""
        prompt_tokens = sum(row.num_tokens for row in plan.rows[plan.num_decode_rows :])
        own = self.host_start * len(plan.new) + self.host_prompt * prompt_tokens
        return (self.host_step + self.host_row * len(plan.rows)) / 2 + own

    def eager_seconds(self, plan: StepPlan) -> float:
        """Returns the host's time from then on until the step is launched."""
        return self.host_eager if self.host_eager and features(plan, self.graphs).eager else 0.0

    def collect_seconds(self, plan: StepPlan, num_ended: int) -> float:
        """Returns the host's time after the step's result."""
        return (self.host_step + self.host_row * len(plan.rows)) / 2 + self.host_end * num_ended
