"""Functions with a state in models of transformers: which calls are taken, and what is found out about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny_models
from support.models.architectures import quiet
from support.models.foreign import engine
from torch import nn
from transformers.models.lfm2 import modeling_lfm2

from headrace.errors import ConfigError
from headrace.models.fallback.contract import ContextCell
from headrace.models.fallback.refusal import Unfit
from headrace.models.fallback.transformers.recurrence import Convolution, DeltaRule, SelectiveScan, StateSpace
from headrace.models.fallback.transformers.states import StateCalls, StateRecorder, TracedState, patch_states

T = 5


def conv(**changes: Any) -> Convolution:
    return Convolution(torch.randn(1, 12, T), torch.randn(12, 4), **changes)


def delta(**changes: Any) -> DeltaRule:
    q, v, g = torch.randn(1, T, 2, 2), torch.randn(1, T, 2, 2), torch.zeros(1, T, 2)
    return DeltaRule(q, q, v, g, g, **{"use_qk_l2norm_in_kernel": True} | changes)


def space(**changes: Any) -> StateSpace:
    b = torch.randn(1, T, 1, 4)
    return StateSpace(
        torch.randn(1, T, 2, 2), torch.randn(1, T, 2), -torch.ones(2), b, b, 64, **{"dt_softplus": True} | changes
    )


def scan(**changes: Any) -> SelectiveScan:
    x, b = torch.randn(1, 12, T), torch.randn(1, 4, T)
    return SelectiveScan(x, x, -torch.ones(12, 4), b, b, **{"delta_softplus": True} | changes)


@pytest.mark.parametrize(
    ("call", "changes", "why"),
    [
        (conv, {"activation": "gelu"}, "its convolution has the activation gelu"),
        (conv, {"seq_idx": torch.zeros(1, T)}, "its state takes seq_idx"),
        (delta, {"use_qk_l2norm_in_kernel": False}, "queries and keys of any length"),
        (delta, {"initial_state": torch.zeros(1, 2, 2, 2)}, "its state takes initial_state"),
        (space, {"dt_softplus": False}, "do not go through softplus"),
        (space, {"D": torch.ones(2, 2)}, "do not have one rate, one D and one bias each"),
        (space, {"z": torch.ones(1, T, 4)}, "its state takes z"),
        (scan, {"delta_softplus": False}, "do not go through softplus"),
        (scan, {"return_last_state": True}, "its state takes return_last_state"),
    ],
)
def test_calls_that_kernels_do_not_support_are_refused(call: Any, changes: dict[str, Any], why: str) -> None:
    call()
    with pytest.raises(Unfit, match=why):
        call(**changes)


def test_a_convolution_belongs_to_the_recurrence_behind_it_if_its_channels_are_those() -> None:
    module = nn.Identity()
    recorder = StateRecorder({module: "mixer"}, T, lambda: None)
    for call in (conv(), delta(), conv(), space(), scan()):
        recorder.compute(module, call)
    assert [(spec.kind, None if spec.conv is None else spec.conv.width) for spec in recorder.specs] == [
        ("gdn", 4),
        ("ssd", 4),
        ("mamba1", None),
    ]
    assert [call.layer for call in recorder.calls] == [0, 0, 1, 1, 2]
    with pytest.raises(Unfit, match="mixer: its state takes 5 tokens where 6 were given"):
        StateRecorder({module: "mixer"}, T + 1, lambda: None).compute(module, conv())


def test_calls_out_of_turn_and_passes_that_end_early_are_errors() -> None:
    first, second = nn.Identity(), nn.Identity()
    calls = StateCalls([first, second], [TracedState("first", 0), TracedState("second", 1)], ContextCell())
    with pytest.raises(ValueError, match="comes from a Identity out of turn"), calls.alone(lambda *_: None), calls.in_order():
        calls.compute(second, conv())
    with pytest.raises(ValueError, match="1 of 2 functions"), calls.alone(lambda *_: None), calls.in_order():
        calls.compute(first, conv())


@pytest.mark.parametrize("call", [conv, delta, space, scan])
def test_tokens_of_a_verified_model_stay_apart(call: Any) -> None:
    """A token that is not a number reaches no other, whichever argument it is in."""
    made = call()
    clean = made.alone()
    assert clean.isfinite().all()
    axis = clean.shape.index(T, 1)
    for value in vars(made).values():
        if isinstance(value, torch.Tensor) and value.shape[0] == T:
            kept = value[1].clone()
            value[1] = torch.nan
            bad = made.alone().isnan().movedim(axis, 0).flatten(1)
            assert bad[1].any() and not bad[[0, 2, 3, 4]].any()
            value[1] = kept


def test_a_function_that_computes_otherwise_than_its_name_says_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", lambda *args, **kwargs: 1.5 * own(*args, **kwargs))
    with quiet():
        tiny_models.save(tiny_models.model("lfm2"), tmp_path)
        with pytest.raises(ConfigError, match="a Convolution of state layer 0 is not what its name says"):
            engine(tmp_path)


def test_a_patched_module_runs_in_its_model_alone() -> None:
    with quiet():
        model = tiny_models.model("lfm2")
    patch_states(model)
    with pytest.raises(ValueError, match="a Lfm2ShortConv was called outside of the model"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
