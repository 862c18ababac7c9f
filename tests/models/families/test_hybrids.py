"""Hybrid families say what transformers says, token for token, however their prompts are cut and whatever runs beside them."""

from __future__ import annotations

import pytest
from support.models.harness import Bench
from support.models.hybrids import CASES, pair
from transformers import CONFIG_MAPPING

from headrace.errors import ConfigError
from headrace.models import registry

from .equality import check_company, check_greedy

STEPS = 12
LENGTHS = (1, 30, 70)
COMMON = (
    *("qwen3.5-tied", "qwen3-next", "lfm2", "lfm2-adjusted", "bamba", "granite-dense", "falcon-h1-norm", "nemotron-h-biases"),
    *("nemotron-h", "nemotron-h-experts", "olmo-hybrid-even", "qwen3.5-pictures", "qwen3.5-moe-pictures"),
)
"""What other cases here have too."""
MIXED = ("qwen3.5-moe", "lfm2-moe", "falcon-h1", "nemotron-h-latent")
"""The kinds of states, and of layers."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in COMMON else name for name in CASES]


NEAR = 2e-4
"""Bound of the difference of a logprob in float32."""


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers(name: str) -> None:
    theirs, ours = pair(name)
    tokens = check_greedy(theirs, Bench(ours, num_blocks=160), LENGTHS, STEPS, NEAR)
    assert len({token for sequence in tokens for token in sequence}) > STEPS


@pytest.mark.parametrize("name", [name if name in MIXED else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_chunks_copies_preemption_and_company_change_nothing(name: str) -> None:
    """Four sequences in one cache: in chunks beside others, from another's state, and taken away and resumed."""
    _, ours = pair(name)
    check_company(ours, padding=True, near=NEAR)


@pytest.mark.parametrize("name", NAMES)
def test_all_that_a_model_holds_lies_on_its_device(name: str) -> None:
    theirs, _ = pair(name)
    model = registry.build(registry.model_spec(theirs.config), "float32", "meta")
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert [where for where, tensor in held.items() if not tensor.is_meta] == []


def test_windows_of_lightning_models_are_refused() -> None:
    kind, values = CASES["minimax"]
    with pytest.raises(ConfigError, match="sliding_window 7 is not supported"):
        registry.model_spec(CONFIG_MAPPING[kind](**values | {"sliding_window": 7}))


def test_kimi_linear_as_it_is_published() -> None:
    """Layers are numbered from 1 in a field of their own, and the first of them are dense."""
    _, values = CASES["kimi-linear"]
    renamed = {
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_group": "num_expert_group",
    }
    fields = {
        renamed.get(name, name): value for name, value in values.items() if not name.startswith(("linear_", "layer_types"))
    }
    delta = {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 12, "num_heads": 4, "short_conv_kernel_size": 4}
    fields |= {"linear_attn_config": delta, "first_k_dense_replace": 1, "model_max_length": values["max_position_embeddings"]}
    del fields["max_position_embeddings"]
    kimi = CONFIG_MAPPING["kimi_linear"]
    assert registry.model_spec(kimi.from_dict(fields)) == registry.model_spec(kimi(**values))
