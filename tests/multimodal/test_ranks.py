"""Prompts with pictures on tensor-parallel ranks, each of which has the encoder: tokens are those of one rank."""

from __future__ import annotations

import pytest
from support.served_pictures import ALONE, MOVING, engine, generate, prompts, same, served

QUICK = "ernie4_5_vl_moe"
"""Positions of three sections, and experts of pictures."""


@pytest.mark.parametrize(
    "kind", [kind if kind == QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in (*MOVING, *ALONE)]
)
def test_ranks_see_the_pictures(kind: str) -> None:
    """Two ranks match transformers for chunked prompts, for concurrent requests and with cached prefixes."""
    own, cases = served(kind), prompts(kind)
    with engine(own.folder, tensor_parallel_size=2) as llm:
        for _ in range(2):
            for case, output in zip(cases.values(), generate(llm, *cases.values()), strict=True):
                same(output, own.expected(case))
        llm.check_integrity()
