"""Angles for any positions, as Megatron's own modules have them for places 0, 1, 2 ..."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import megatron

from headrace.models.fallback.megatron.rotary import Rotary, StepRotary
from headrace.models.fallback.refusal import Unfit

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")
pytestmark = pytest.mark.filterwarnings("ignore")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half": {"rotary_percent": 0.5},
    "interleaved": {"rotary_interleaved": True},
    "base": {"rotary_base": 700},
    "stretched": {"seq_len_interpolation_factor": 8.0},
    "scaled": {"rope_scaling": True, "rope_scaling_factor": 8.0, "rotary_base": 500000},
}
YARN: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling_factor": 16.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.0},
    "no magnitude": {"scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "not rounded": {"scaling_factor": 4.0, "original_max_position_embeddings": 32, "correction_range_round_to_int": False},
    "other bounds": {"scaling_factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0, "rotary_base": 500.0},
}
POSITIONS = torch.tensor([0, 5, 1, 1, 60, 33])


@pytest.fixture(autouse=True)
def groups() -> None:
    megatron.start()


@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind: str) -> None:
    from megatron.core.models.common.embeddings import RotaryEmbedding

    with megatron.no_device_asked_for():
        module = RotaryEmbedding(32, **{"rotary_percent": 1.0, "use_cpu_initialization": True, **KINDS[kind]})
        expected = module(64)
    ours = Rotary(module, "rotary", torch.device("cpu"))
    torch.testing.assert_close(ours.angles(POSITIONS), expected[POSITIONS])
    assert ours.magnitude == 1.0
    stand_in = StepRotary(ours)
    stand_in.angles = ours.angles(POSITIONS)
    assert torch.equal(stand_in(1000), stand_in.angles)
    assert stand_in.get_rotary_seq_len(None, None, None, None) == len(POSITIONS)


@pytest.mark.parametrize("kind", YARN)
def test_yarn(kind: str) -> None:
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    with megatron.no_device_asked_for():
        module = YarnRotaryEmbedding(32, use_cpu_initialization=True, **YARN[kind])
        expected, magnitude = module(64)
        cosines, sines = module.get_cached_cos_sin(64, dtype=torch.float32)
    ours = Rotary(module, "rotary", torch.device("cpu"))
    torch.testing.assert_close(ours.angles(POSITIONS), expected[POSITIONS])
    assert ours.magnitude == pytest.approx(magnitude)
    stand_in = StepRotary(ours)
    stand_in.angles = ours.angles(POSITIONS)
    given, factor = stand_in(1000)
    assert given is stand_in.angles
    assert factor == ours.magnitude
    cached = stand_in.get_cached_cos_sin(1000, dtype=torch.float32)
    torch.testing.assert_close(cached[0], cosines[POSITIONS])
    torch.testing.assert_close(cached[1], sines[POSITIONS])


def test_positions_of_several_numbers_are_refused() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding

    with megatron.no_device_asked_for():
        module = MultimodalRotaryEmbedding(16, 1.0)
    with pytest.raises(Unfit, match="rotary: positions of a MultimodalRotaryEmbedding are not one number a token"):
        Rotary(module, "rotary", torch.device("cpu"))


def test_angles_are_there_in_a_step_alone() -> None:
    from megatron.core.models.common.embeddings import RotaryEmbedding

    module = RotaryEmbedding(8, 1.0, use_cpu_initialization=True)
    with pytest.raises(ValueError, match="outside a step"):
        StepRotary(Rotary(module, "rotary", torch.device("cpu")))(3)
