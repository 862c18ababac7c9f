"""The definitions of docs/add-a-model.md do what the page says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.models.cases import VOCAB, pair
from support.models.harness import Bench, model_spec
from support.pages import ROOT, run_blocks
from transformers import PretrainedConfig

from headrace.model_spec import AttentionSpec, RopeSpec
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.family import Family

HEADS: dict = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "scale": 0.35, "rotary_dim": 8}
LAYERS = [AttentionSpec(layer=layer, rope=RopeSpec(10000.0), **HEADS) for layer in range(2)]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Returns the names that the page's blocks of Python define."""
    defined: dict[str, Any] = {"__name__": __name__}
    run_blocks(ROOT / "docs" / "add-a-model.md", defined)
    return defined


def filled(kind: type[Decoder], spec: object) -> Decoder:
    model = kind(spec, torch.float32, "cpu")
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model


def logits(model: Decoder) -> torch.Tensor:
    bench = Bench(model)
    return bench.prefill(bench.sequence([5, 9, 2, 33, 7]), chunk=3)


def test_a_family_is_its_configuration(names: dict[str, Any]) -> None:
    family = names["FAMILY"]
    assert isinstance(family, Family)
    model, ours = pair("qwen2")
    config: PretrainedConfig = model.config
    assert config.vocab_size == VOCAB
    assert family.model_spec(config) == registry.model_spec(config) == ours.spec


def test_values_are_scaled(names: dict[str, Any]) -> None:
    kind, spec = names["MimoDecoder"], names["MimoSpec"]
    plain = model_spec(LAYERS)
    facts = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    one, two = (filled(kind, spec(**facts, value_scale=scale)) for scale in (1.0, 2.0))
    torch.testing.assert_close(logits(one), logits(filled(Decoder, model_spec(LAYERS))))
    for layer in two.layers:
        layer.self_attn.o_proj.weight.data /= 2
    torch.testing.assert_close(logits(two), logits(one))


@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_unfused_attention_is_the_common_one(names: dict[str, Any], qk_norm: bool) -> None:
    spec = model_spec(LAYERS, qk_norm=qk_norm)
    common, plain = filled(Decoder, spec), filled(Decoder, spec)
    for layer in plain.layers:
        layer.self_attn.__class__ = names["UnfusedAttention"]
    torch.testing.assert_close(logits(plain), logits(common), rtol=0, atol=0)
