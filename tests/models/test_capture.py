"""Reasons why a model runs eagerly: the messages of a failed capture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.models.capture import eager_reason, failing_module, one_line


class Waiting(nn.Module):
    """Fails as an operation does that the capture of a CUDA graph does not permit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not permitted\n when stream is capturing")


def capture(model: nn.Module) -> Exception:
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(1, 2))
    return caught.value


def test_the_innermost_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), Waiting()))
    error = capture(model)
    assert failing_module(error, model) == "1.1"
    assert eager_reason(error, model) == (
        "a step cannot be captured: 1.1: RuntimeError: CUDA error: operation not permitted when stream is capturing"
    )


def test_a_replaced_forward_is_named_by_its_module() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model[1].forward = lambda x: x.no_such_method()
    with pytest.raises(AttributeError) as caught:
        model(torch.zeros(1, 2))
    assert failing_module(caught.value, model) == "1"


def test_an_error_outside_of_its_parts_is_the_models() -> None:
    model = nn.Sequential(nn.Identity())
    assert failing_module(ValueError("elsewhere"), model) == ""
    assert eager_reason(ValueError("elsewhere"), model) == "a step cannot be captured: Sequential: ValueError: elsewhere"


def test_long_errors_are_cut() -> None:
    assert len(one_line(ValueError("x" * 1000), 50)) == 50
