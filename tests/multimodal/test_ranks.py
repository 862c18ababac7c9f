"""Prompts with pictures on tensor-parallel ranks, each of which has the encoder: tokens are those of one rank."""

from __future__ import annotations

import pytest
from support.served_pictures import ALONE, MOVING, engine, generate, prompts, same, served


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*MOVING, *ALONE])
def test_ranks_see_the_pictures(kind: str) -> None:
    """Two ranks match transformers for chunked prompts, for concurrent requests and with cached prefixes."""
    own, cases = served(kind), prompts(kind)
    with engine(own.folder, tensor_parallel_size=2) as llm:
        for _ in range(2):
            for case, output in zip(cases.values(), generate(llm, *cases.values()), strict=True):
                same(output, own.expected(case))
        llm.check_integrity()
