"""Refusals of Megatron-core models: by the name of the argument, the layer or the weight, and with the reason."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import megatron
from support.models.megatron_engine import OWN, PROMPTS, engine, tokens_of

from headrace import LLM
from headrace.errors import ConfigError

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'headrace[megatron]'")
pytestmark = pytest.mark.filterwarnings("ignore")

FEATURES: dict[str, Any] = {
    "sequence_parallel": True,
    "moe_expert_capacity_factor": 1.5,
    "moe_router_force_load_balancing": True,
    "moe_input_jitter_eps": 0.1,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "cuda_graph_impl": "local",
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "defer_embedding_wgrad_compute": True,
    "fp8": "hybrid",
    "fp4": "e2m1",
    "cache_mla_latents": True,
    "experimental_attention_variant": "dsa",
    "inference_fuse_tp_communication": True,
    "fused_single_qkv_rope": True,
}


@contextlib.contextmanager
def refused(match: str, param: str = "model_impl") -> Iterator[None]:
    with pytest.raises(ConfigError, match=match) as caught:
        yield
    assert caught.value.param == param


@pytest.mark.parametrize("name", FEATURES)
def test_configurations_that_cannot_run_are_refused(name: str) -> None:
    model = megatron.gpt()
    setattr(model.config, name, FEATURES[name])
    with refused(f"GPTModel cannot run through Megatron: {name} is {FEATURES[name]}: "):
        engine(model)


def test_models_that_cannot_run_are_refused_with_the_layer() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    with refused("it is in 2 chunks"):
        LLM.from_megatron([megatron.gpt(), megatron.gpt()])
    with refused("it is a Linear, not a GPTModel"):
        LLM.from_megatron(torch.nn.Linear(2, 2))
    model = megatron.gpt()
    model.decoder.layers[1].self_attention.attn_mask_type = AttnMaskType.no_mask
    with refused(r"decoder\.layers\.1\.self_attention: its mask is no_mask"):
        engine(model)
    with refused(r"decoder\.layers\.0\.self_attention: window_size is \(4, 2\)"):
        engine(megatron.gpt(window_size=(4, 2)))
    model = megatron.gpt()
    model.decoder.layers[2].self_attention = torch.nn.Linear(3, 3)
    with refused(r"decoder\.layers\.2\.self_attention: a Linear has no core_attention"):
        engine(model)
    model = megatron.gpt()
    model.decoder.layers[2].cross_attention = torch.nn.Linear(3, 3)
    with refused(r"decoder\.layers\.2\.cross_attention: it attends to another sequence"):
        engine(model)
    model = megatron.gpt()
    model.position_embedding_type = "mrope"
    with refused("position_embedding_type mrope"):
        engine(model)
    model = megatron.gpt()
    model.post_process = False
    with refused("one stage of a pipeline"):
        engine(model)


@pytest.mark.parametrize("number", [None, "1", True, 2.0, "absent"])
def test_a_layer_number_that_is_no_number_is_refused_with_the_layer(number: Any) -> None:
    for part in ("", ".self_attention"):
        model = megatron.gpt(window_size=(4, 0), window_attn_skip_freq=2)
        module = model.get_submodule(f"decoder.layers.1{part}")
        module.layer_number = number
        if number == "absent":
            del module.layer_number
        said = "is missing" if number == "absent" else f"is {number!r}"
        with refused(rf"Megatron: decoder\.layers\.1{part}: layer_number {said}, and must be a whole number"):
            engine(model)
    model = megatron.gpt(apply_query_key_layer_scaling=True, attention_softmax_in_fp32=True)
    model.decoder.layers[1].self_attention.core_attention.layer_number = None
    with refused(r"decoder\.layers\.1\.self_attention\.core_attention: layer_number is None"):
        engine(model)


@pytest.mark.parametrize("size", ["80", 80.0, True, 0, -3])
def test_a_vocabulary_that_is_no_number_is_refused(size: Any) -> None:
    with refused("vocab_size is .*, and must be a whole number of at least 1", "vocab_size"):
        engine(megatron.gpt(), vocab_size=size)
    model = megatron.gpt()
    model.vocab_size = size
    with refused("Megatron: vocab_size is .*, and must be a whole number"):
        engine(model)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.linear_fc2.bias",
        "output_layer.weight",
        "embedding.word_embeddings.weight",
    ],
)
def test_products_of_two_dtypes_are_refused_with_the_weight(name: str) -> None:
    model = megatron.gpt(dtype=torch.bfloat16, bf16=True, add_bias_linear=True)
    parameter = model.get_parameter(name)
    parameter.data = parameter.data.float()
    at_fault, its, other = name, "float32", "bfloat16"
    if name.startswith("embedding"):
        at_fault, its, other = r"decoder\.layers\.0\.self_attention\.linear_proj\.weight", "bfloat16", "float32"
    with refused(rf"Megatron: {at_fault}: it is {its} and embedding\.word_embeddings\.weight is {other}: "):
        engine(model)


def test_norms_sinks_and_routers_may_have_a_dtype_of_their_own() -> None:
    with megatron.no_device_asked_for():
        model = megatron.gpt(dtype=torch.bfloat16, bf16=True, softmax_type="learnable", **OWN["experts"])
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "router" in name:
                parameter.data = parameter.data.float()
        assert len(tokens_of(engine(model), PROMPTS[0])) == 8


def test_routers_that_ask_for_another_device_are_refused() -> None:
    with megatron.no_device_asked_for():
        model = megatron.gpt(**OWN["experts"])
    with refused(r"decoder\.layers\.0\.mlp\.router: Megatron's router (asks for|moves to)"):
        engine(model)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("quantization", "int8"),
        ("load_format", "dummy"),
        ("model_impl", "native"),
        ("skip_tokenizer_init", True),
        ("tokenizer", object()),
    ],
)
def test_arguments_that_would_change_the_model_are_refused(name: str, value: Any) -> None:
    with refused("", name):
        engine(megatron.gpt(), **{name: value})


def test_arguments_of_another_model_raise() -> None:
    model = megatron.gpt()
    with pytest.raises(ValueError, match="config is not the model's: num_query_groups"):
        LLM.from_megatron(model, megatron.gpt(num_query_groups=4).config)
    with pytest.raises(ValueError, match="vocab_size is 97, but the model has 96"):
        LLM.from_megatron(model, vocab_size=97)
    with refused("config is a dict, not the model's TransformerConfig", "config"):
        LLM.from_megatron(model, {"vocab_size": "80"})
    with pytest.raises(TypeError, match="max_tokens"):
        LLM.from_megatron(model, max_tokens=3)


def test_without_the_library_one_line_says_how_to_install_it() -> None:
    model = megatron.gpt()
    with mock.patch.dict(sys.modules, {"megatron.core": None}), pytest.raises(ImportError) as caught:
        engine(model)
    assert str(caught.value).endswith("pip install 'megatron-core==0.16.1'")
    assert "\n" not in str(caught.value)
