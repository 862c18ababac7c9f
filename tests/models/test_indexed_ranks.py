"""Two ranks choose what one chooses: each with all of a lightning indexer, or with some of its index heads."""

from __future__ import annotations

import pytest
from support.models.indexed import CASES, pair

from models.test_tensor_parallel import parts, same_on_ranks


@pytest.mark.parametrize(
    "name", [name if name in ("v3.2", "minimax-m3") else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_two_ranks_say_what_one_says(name: str) -> None:
    theirs, whole = pair(name)
    same_on_ranks(whole, theirs.state_dict(), parts(whole.spec, 2), lengths=(3, 33))
