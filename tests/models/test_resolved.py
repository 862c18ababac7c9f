"""A model is built as resolved after its description: outputs equal those of transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM, PreTrainedModel, Qwen2VLForConditionalGeneration, Qwen3ForCausalLM

from headrace import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 192,
}
MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": None,
    "first_k_dense_replace": 2,
    "head_dim": 8,
}
PICTURES = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 2}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
"""Qwen2-VL's heads share the hidden size, whatever ``head_dim`` says."""
BORDER = 32
PROMPT = [3 + 5 * place % 83 for place in range(70)]
"""Longer than the border of longrope, so that transformers takes its long factors too."""


def rope(**parameters: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "original_max_position_embeddings": BORDER, **parameters}}


YARN = rope(rope_type="yarn", factor=2.0)
MSCALE = rope(rope_type="yarn", factor=2.0, mscale=1.0, mscale_all_dim=1.0)
FACTORS: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [1.5 + index for index in range(8)]}
LONG = rope(rope_type="longrope", **FACTORS)
SECTIONS = rope(rope_type="longrope", mrope_section=[4, 2, 2], **FACTORS)


def save(folder: Path, model_class: type[PreTrainedModel], fields: dict[str, Any]) -> PreTrainedModel:
    config_class: Any = model_class.config_class
    pictures = "vision_config" in config_class.sub_configs
    config = config_class(text_config=fields, vision_config=PICTURES) if pictures else config_class(**fields)
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    model.train(False)
    return model


@torch.no_grad()
def continued(model: PreTrainedModel, steps: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers, whose every step computes all tokens, and the logprobs of all tokens but the first."""
    tokens = list(PROMPT)
    for _ in range(steps):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    logprobs = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
    return tokens[len(PROMPT) :], [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


def ours(folder: Path, **args: Any) -> tuple[list[int], list[float]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    fixed: dict[str, Any] = {"model_impl": "native", "dtype": "float32", "skip_tokenizer_init": True, "num_threads": 1}
    with LLM(str(folder), num_kv_blocks=40, **fixed, **args) as llm:
        (result,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling)
    entries = [*(result.prompt_logprobs or [])[1:], *(result.outputs[0].logprobs or [])]
    return list(result.outputs[0].token_ids), [one.logprob for entry in entries if entry for one in entry.values()]


@pytest.mark.parametrize(
    ("model_class", "fields", "args", "resolved"),
    [
        (Qwen3ForCausalLM, SMALL | YARN, {"yarn_factor": "positions"}, {"factor": 6.0}),
        pytest.param(
            *(Qwen3ForCausalLM, SMALL | YARN, {"yarn_factor": "positions", "tensor_parallel_size": 2}, {"factor": 6.0}),
            marks=pytest.mark.slow,
        ),
        (DeepseekV3ForCausalLM, SMALL | MLA | YARN, {"yarn_factor": "positions"}, {"factor": 6.0}),
        (DeepseekV3ForCausalLM, SMALL | MLA | MSCALE, {"yarn_factor": "positions"}, {"factor": 6.0}),
        (Qwen3ForCausalLM, SMALL | LONG, {"max_model_len": 128}, {}),
        (Qwen2VLForConditionalGeneration, SMALL | HEADS | SECTIONS, {"max_model_len": 128}, {}),
    ],
    ids=["yarn", "yarn-ranks", "yarn-mla", "yarn-mscale", "longrope", "longrope-sections"],
)
def test_resolved_rotary_factors_are_those_of_transformers(
    model_class: type[PreTrainedModel], fields: dict[str, Any], args: dict[str, Any], resolved: dict[str, Any], tmp_path: Path
) -> None:
    saved = save(tmp_path, model_class, fields)
    config = copy.deepcopy(saved.config)
    config.get_text_config().rope_parameters |= resolved
    theirs = model_class._from_config(config, dtype=torch.float32)
    theirs.load_state_dict(saved.state_dict())
    theirs.train(False)
    tokens, logprobs = continued(theirs, 12)
    found, values = ours(tmp_path, **args)
    assert found == tokens and values == pytest.approx(logprobs, abs=1e-4)
