"""The backend that docs/attention-backends.md shows, against the reference."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import layer_spec, make_case
from support.pages import ROOT, run_blocks

from headrace.attention import select
from headrace.kernels import native


def test_the_example_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_ENTRIES", dict(select._ENTRIES))
    run_blocks(ROOT / "docs" / "attention-backends.md", {})
    assert select.refusals(layer_spec(window=3), "cpu", "float32")["row-by-row"] == ["it does not support a layer's window"]
    choice = select.choose(layer_spec(), "cpu", "float32", requested="native+row-by-row") if native.load() else None
    assert choice is None or (choice.decode, choice.prefill) == ("native", "row-by-row")
    for name in ("row-by-row", "native+row-by-row") if native.load() else ("row-by-row",):
        case = make_case(layer_spec(v_head_dim=9), [(1, 9), (1, 1), (7, 7), (5, 23)], extra_tokens=2)
        backend, oracle = select.create(name), select.create("reference")
        for each in (backend, oracle):
            each.plan(case.step)
        torch.testing.assert_close(backend.run(case.inputs), oracle.run(case.inputs), atol=2e-5, rtol=1e-3)
