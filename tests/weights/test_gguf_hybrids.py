"""GGUF files of hybrid models: what llama.cpp's converter renames, reshapes, reorders and computes is undone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.models.cases import greedy, prompt
from support.models.hybrids import pair

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.sources.gguf import read_facts
from headrace.weights.load import load_weights

from .models import files, permuted

Tensors = dict[str, torch.Tensor]
COMMON = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
}
MAMBA = {
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.weight": "ssm_conv1d.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm.weight": "ssm_norm.weight",
    "mamba.out_proj.weight": "ssm_out.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
NAMES: dict[str, dict[str, str]] = {
    "qwen3next": COMMON
    | {
        "linear_attn.in_proj_qkv": "attn_qkv.weight",
        "linear_attn.in_proj_z": "attn_gate.weight",
        "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        **{f"mlp.shared_expert.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("gate", "up", "down")},
        **{f"mlp.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")},
    },
    "lfm2": COMMON
    | {
        "operator_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "conv.conv.weight": "shortconv.conv.weight",
        "conv.in_proj.weight": "shortconv.in_proj.weight",
        "conv.out_proj.weight": "shortconv.out_proj.weight",
        "self_attn.out_proj.weight": "attn_output.weight",
        "self_attn.q_layernorm.weight": "attn_q_norm.weight",
        "self_attn.k_layernorm.weight": "attn_k_norm.weight",
        **{f"feed_forward.{w}.weight": f"ffn_{kind}.weight" for w, kind in (("w1", "gate"), ("w3", "up"), ("w2", "down"))},
        "feed_forward.gate.weight": "ffn_gate_inp.weight",
        "feed_forward.expert_bias": "exp_probs_b.bias",
        **{f"feed_forward.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")},
    },
    "granitehybrid": COMMON
    | MAMBA
    | {
        "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
        **{f"block_sparse_moe.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")},
        **{f"shared_mlp.{kind}": f"ffn_{kind}_shexp.weight" for kind in ("gate", "up", "down")},
    },
}
"""By a table of the test's own."""


def parted(state: Mapping[str, torch.Tensor], group: str, config: Any) -> Tensors:
    """Splits what transformers has in one tensor, and computes what the converter does."""
    made: Tensors = {}
    for name, tensor in state.items():
        head, _, last = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if last == "gate_up_proj":
            made |= dict(zip((f"{head}.gate_proj", f"{head}.up_proj"), tensor.chunk(2, dim=1), strict=True))
        elif name.endswith("shared_mlp.input_linear.weight"):
            made |= dict(zip((f"{head[:-12]}gate", f"{head[:-12]}up"), tensor.chunk(2), strict=True))
        elif name.endswith("shared_mlp.output_linear.weight"):
            made[f"{head[:-13]}down"] = tensor
        elif "in_proj_qkvz" in name:
            keys, values = config.linear_num_key_heads, config.linear_num_value_heads * config.linear_value_head_dim
            widths = (config.linear_key_head_dim, config.linear_key_head_dim, values // keys, values // keys)
            q, k, v, z = (part.reshape(-1, tensor.shape[1]) for part in tensor.unflatten(0, (keys, -1)).split(widths, dim=1))
            made |= {f"{head[:-13]}.in_proj_qkv": torch.cat((q, k, v)), f"{head[:-13]}.in_proj_z": z}
        elif name.endswith("A_log"):
            made[name] = -tensor.exp().reshape(-1, *([1] if group == "granitehybrid" else []))
        elif name.endswith("mamba.D"):
            made[name] = tensor.reshape(-1, 1)
        elif name.endswith("mamba.norm.weight"):
            made[name] = tensor.reshape(config.mamba_n_groups, -1)
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            made[name] = tensor.squeeze(1)
        elif group == "qwen3next" and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            made[name] = tensor + 1
        elif group == "granitehybrid" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            made[name] = torch.from_numpy(permuted(tensor.numpy(), heads))
        else:
            made[name] = tensor
    return made


def stored_name(name: str, group: str, dense: bool) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
        "model.embedding_norm.weight": "token_embd_norm.weight",
    }
    if name in whole:
        return whole[name]
    layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()  # type: ignore[union-attr]
    found = NAMES[group][rest.replace("router.layer", "router").replace(".mlp.experts", ".experts")]
    return f"blk.{layer}.{found.replace('_shexp', '') if dense else found}"


def fields(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    attends = [kind == "full_attention" for kind in config.layer_types]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10000.0))
    if arch == "qwen3next":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim // 4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_head_count_kv([config.num_key_value_heads if here else 0 for here in attends])
    if arch.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if experts := getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


Encode = Callable[[np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def q8(rows: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quantize(rows, kind), kind


def write(path: Path, arch: str, theirs: torch.nn.Module, encode: Encode | None = None) -> Path:
    writer, group = gguf.GGUFWriter(path, arch), "lfm2" if arch.startswith("lfm2") else arch
    config: Any = theirs.config
    fields(writer, arch, config)
    dense = group == "granitehybrid" and not config.num_local_experts
    for name, tensor in parted(theirs.state_dict(), group, config).items():
        stored = stored_name(name, group, dense)
        rows, kind = np.ascontiguousarray(tensor.numpy()), gguf.GGMLQuantizationType.F32
        if encode is not None and rows.ndim >= 2 and not re.search(r"ssm_(a|d|norm|conv1d)|shortconv\.conv|gate_inp", stored):
            rows, kind = encode(rows)
        writer.add_tensor(stored, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path: Path) -> Decoder:
    config = read_facts(path).config
    model = registry.build(registry.model_spec(config), "float32", "cpu")
    load_weights(model, registry.name_table(model.spec), files(config, "gguf", [path]))
    return model


CASES = {
    "qwen3-next": "qwen3next",
    "lfm2": "lfm2",
    "lfm2-moe": "lfm2moe",
    "granite-moe": "granitehybrid",
    "granite-dense": "granitehybrid",
}


@pytest.mark.parametrize("name", CASES)
def test_files_hold_the_model(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name)
    model = loaded(write(tmp_path / "m.gguf", CASES[name], theirs))
    assert model.spec.layers == ours.spec.layers and model.spec.states == ours.spec.states
    assert model.spec.mlps == ours.spec.mlps and model.spec.blocks == ours.spec.blocks
    wanted = dict(ours.named_parameters())
    for parameter, tensor in model.named_parameters():
        torch.testing.assert_close(tensor, wanted[parameter], atol=1e-6, rtol=1e-6, msg=parameter)


def test_a_quantised_file_says_what_its_floats_say(tmp_path: Path) -> None:
    """transformers' model with the rounded weights, through the engine, with a snapshot that is found."""
    theirs = copy.deepcopy(pair("lfm2")[0])
    path = write(tmp_path / "m.gguf", "lfm2", theirs, q8)
    for tensor in theirs.state_dict().values():
        if tensor.dim() == 2:
            tensor.copy_(torch.from_numpy(gguf.dequantize(*q8(tensor.numpy()))))
    tokens = prompt(100)
    with LLM(str(path), dtype="float32", max_model_len=256, skip_tokenizer_init=True, num_threads=1) as llm:
        for cached in (0, 64):
            (output,) = llm.generate(
                [{"prompt_token_ids": tokens}], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            )
            assert list(output.outputs[0].token_ids) == greedy(theirs, tokens, 6)[0]
            assert output.num_cached_tokens == cached


def test_layers_that_attend_have_equal_numbers_of_kv_heads(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "lfm2")
    config: Any = pair("lfm2")[0].config
    fields(writer, "lfm2", config)
    writer.add_key_value(
        "lfm2.attention.head_count_kv", [1, 0, 2, 0], gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.INT32
    )
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"lfm2\.attention\.head_count_kv differs among layers that attend"):
        read_facts(tmp_path / "m.gguf")
