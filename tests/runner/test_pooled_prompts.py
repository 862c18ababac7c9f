"""What is pooled of a prompt does not depend on where its chunks end."""

from __future__ import annotations

from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.plan import NewSequence, Row, pack_tokens
from headrace.pooling_params import PoolingParams
from headrace.runner.prompts import PooledPrompts
from headrace.sampling_params import SamplingParams

LENGTH, WIDTH = 23, 8


def sequence(pooling: PoolingParams) -> NewSequence:
    return NewSequence(1, 0, pack_tokens(range(LENGTH)), LENGTH, SamplingParams(), 0, 0, [], None, pooling=pooling)


def pooled(hidden: torch.Tensor, cuts: list[int], pooling: PoolingParams) -> list[bytes]:
    """The results of a prompt whose chunks end at ``cuts``, in a batch beside rows that are not pooled."""
    prompts = PooledPrompts(cast(Any, None))
    prompts.add(sequence(pooling))
    found = []
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        other = Row(2, 1, 0, 3, 1, ())
        rows = [other, Row(1, 0, start, end - start, 0, ()), other]
        beside = torch.full((3, WIDTH), 7.0, dtype=hidden.dtype)
        results = prompts.measure(rows, torch.cat((beside, hidden[start:end], beside)))
        assert bool(results) == (end == LENGTH)
        found += [result.numpy().tobytes() for _, values in results for result in values]
    return found


@settings(max_examples=30, derandomize=True, deadline=None)
@given(
    st.sets(st.integers(1, LENGTH - 1)),
    st.integers(0, LENGTH - 1),
    st.sampled_from(["last", "mean"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_chunks_change_no_bit(cuts: set[int], start: int, method: Any, dtype: torch.dtype) -> None:
    hidden = (torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(len(cuts))) * 3).to(dtype)
    pooling = PoolingParams(method=method, start=start if method == "mean" else 0)
    (whole,) = pooled(hidden, [], pooling)
    assert pooled(hidden, sorted(cuts), pooling) == [whole]
    expected = hidden[-1].double() if method == "last" else hidden[start:].double().mean(0)
    values = torch.frombuffer(bytearray(whole), dtype=torch.float32)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=1e-6)
