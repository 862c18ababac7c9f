"""The experts' kernels and those that they are timed beside compute the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headrace.kernels.moe import moe_mlp, route
from headrace.model_spec import MoeSpec

pytest.importorskip("triton")


def test_the_library_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "gpu_moe_mla", raising=False)
    import gpu_moe_mla

    spec = MoeSpec(num_experts=9, top_k=3, intermediate_size=24)
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(13, 32), 0.2 * torch.randn(9, 48, 32), 0.2 * torch.randn(9, 32, 24)
    experts, weights = route(torch.randn(13, 9), spec)
    expected = moe_mlp(x, experts, weights, gate_up, down, spec)
    torch.testing.assert_close(gpu_moe_mla.library(x, experts, weights, gate_up, down, spec), expected, atol=1e-5, rtol=1e-5)
