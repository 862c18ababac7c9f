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
from support.models.harness import Bench
from support.models.hybrids import CASES as HYBRIDS
from support.models.hybrids import pair
from support.thread_ranks import on_ranks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.parallel.group import Group
from headrace.parallel.layout import ParallelSizes, shard_model
from headrace.sources.gguf import read_facts
from headrace.weights.gguf import GGUFCheckpoint
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
DELTA = {
    "linear_attn.in_proj_qkv": "attn_qkv.weight",
    "linear_attn.in_proj_z": "attn_gate.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
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
    **{f"mlp.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("gate", "up", "down")},
    **{f"mlp.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("gate", "up", "gate_up", "down")},
}
NAMES: dict[str, dict[str, str]] = {
    "qwen": COMMON | DELTA,
    "nemotron": {
        **{theirs.replace("self_attn", "mixer"): ours for theirs, ours in COMMON.items()},
        **{theirs.replace("mamba", "mixer"): ours for theirs, ours in MAMBA.items() if "mamba" in theirs},
        "norm.weight": "attn_norm.weight",
        "mixer.gate.weight": "ffn_gate_inp.weight",
        "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
        "mixer.fc1_latent_proj.weight": "ffn_latent_down.weight",
        "mixer.fc2_latent_proj.weight": "ffn_latent_up.weight",
        **{f"mixer.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("up", "down")},
        **{f"mixer.shared_experts.{kind}_proj.weight": f"ffn_{kind}_shexp.weight" for kind in ("up", "down")},
        **{f"mixer.experts.{kind}_proj": f"ffn_{kind}_exps.weight" for kind in ("up", "down")},
    },
    "falcon": COMMON
    | MAMBA
    | {
        "pre_ff_layernorm.weight": "ffn_norm",
        **{f"feed_forward.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("gate", "up", "down")},
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
"""By a table of the test's own, of a group of architectures."""
GROUPS = {
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), "qwen"),
    **dict.fromkeys(("lfm2", "lfm2moe"), "lfm2"),
    "granitehybrid": "granitehybrid",
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "nemotron"),
    "falcon-h1": "falcon",
}


def factor(name: str, config: Any) -> float | torch.Tensor:
    """The factor of a matrix of Falcon-H1, which its file includes."""
    both = config.attention_in_multiplier
    factors = {
        "q_proj.weight": both,
        "k_proj.weight": both * config.key_multiplier,
        "v_proj.weight": both,
        "o_proj.weight": config.attention_out_multiplier,
        "gate_proj.weight": config.mlp_multipliers[0],
        "down_proj.weight": config.mlp_multipliers[1],
        "mamba.out_proj.weight": config.ssm_out_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "embed_tokens.weight": config.embedding_multiplier,
    }
    if name.endswith("mamba.in_proj.weight"):
        inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = torch.tensor((inner, inner, shared, shared, config.mamba_n_heads))
        return config.ssm_in_multiplier * torch.tensor(config.ssm_multipliers).repeat_interleave(parts)[:, None]
    return next((factor for ending, factor in factors.items() if name.endswith(ending)), 1.0)


def dealt(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Deals out the value heads of Qwen3.5: the first of each key head, then the second of each, and so on."""
    keys, shared = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def deal(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows.chunk(keys * shared)[key * shared + turn] for turn in range(shared) for key in range(keys)])

    if "linear_attn" not in name or name.endswith(".norm.weight"):
        return tensor
    if name.endswith("out_proj.weight"):
        return deal(tensor.t()).t()
    start = 2 * keys * config.linear_key_head_dim if "in_proj_qkv" in name or "conv1d" in name else 0
    return torch.cat((tensor[:start], deal(tensor[start:])))


def parted(state: Mapping[str, torch.Tensor], arch: str, config: Any) -> Tensors:
    """Splits what transformers has in one tensor, and computes what the converter does."""
    made, group = Tensors(), GROUPS[arch]
    for name, tensor in state.items():
        head, _, last = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if group == "falcon":
            tensor = tensor * factor(name, config)
        elif arch.startswith("qwen35"):
            tensor = dealt(name, tensor, config)
        if last == "gate_up_proj" and arch != "qwen35moe":
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
            made[name] = -tensor.exp().reshape(-1, *([] if group == "qwen" else [1]))
        elif last == "D":
            made[name] = tensor.reshape(-1, 1)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            made[name] = tensor.reshape(config.n_groups if group == "nemotron" else config.mamba_n_groups, -1)
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            made[name] = tensor.squeeze(1)
        elif group == "qwen" and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            made[name] = tensor + 1
        elif group in ("granitehybrid", "nemotron") and name.endswith(("q_proj.weight", "k_proj.weight")):
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
        "model.embeddings.weight": "token_embd.weight",
        "model.norm_f.weight": "output_norm.weight",
        "model.final_layernorm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    layer, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
    found = NAMES[group][rest.replace("router.layer", "router").replace(".mlp.experts", ".experts")]
    return f"blk.{layer}.{found.replace('_shexp', '') if dense else found}"


def fields(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    group, attends = GROUPS[arch], [kind == "full_attention" for kind in config.layer_types or ()]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(next(getattr(config, name) for name in EPSILONS if hasattr(config, name)))
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    if group == "nemotron":
        width = config.intermediate_size if arch == "nemotron_h" else config.moe_intermediate_size
        writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in config.layers_block_type])
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads - 2)
    elif arch != "qwen35moe":
        writer.add_feed_forward_length(config.intermediate_size)
    if group in ("qwen", "nemotron", "falcon"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if group == "qwen":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(head_dim // 4)
        if sections := config.rope_parameters.get("mrope_section"):
            writer.add_rope_dimension_sections([*sections, 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        if arch != "qwen35":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    elif group == "falcon":
        writer.add_head_count_kv(config.num_key_value_heads)
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
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if group in ("granitehybrid", "falcon"):
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
    if group == "nemotron":
        writer.add_ssm_conv_kernel(config.conv_kernel)
        writer.add_ssm_state_size(config.ssm_state_size)
        writer.add_ssm_group_count(config.n_groups)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
        writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if arch == "nemotron_h_moe":
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    experts = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    if experts and arch != "nemotron_h":
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", None) or config.intermediate_size)


EPSILONS = ("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
Encode = Callable[[np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]


def q8(rows: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quantize(rows, kind), kind


def dequantized(coded: tuple[np.ndarray, gguf.GGMLQuantizationType]) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(*coded))


def write(path: Path, arch: str, theirs: torch.nn.Module, encode: Encode | None = None, *, predicting: bool = False) -> Path:
    """``predicting``: with a layer for multi-token prediction, of which there is one norm."""
    writer, group = gguf.GGUFWriter(path, arch), GROUPS[arch]
    config: Any = theirs.config
    fields(writer, arch, config)
    dense = group == "granitehybrid" and not config.num_local_experts
    if predicting:
        writer.add_block_count(config.num_hidden_layers + 1)
        writer.add_nextn_predict_layers(1)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(config.hidden_size, np.float32))
    for name, tensor in parted(theirs.state_dict(), arch, config).items():
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
    "qwen3.5-tied": "qwen35",
    "qwen3.5-moe": "qwen35moe",
    "nemotron-h": "nemotron_h",
    "nemotron-h-latent": "nemotron_h_moe",
    "falcon-h1": "falcon-h1",
}


@pytest.mark.parametrize("name", CASES)
def test_files_hold_the_model(name: str, tmp_path: Path) -> None:
    theirs, ours = pair(name)
    model = loaded(write(tmp_path / "m.gguf", CASES[name], theirs))
    if name == "falcon-h1":
        # Factors are in the matrices.
        assert Bench(model).generate([prompt(30)], 6)[0] == [greedy(theirs, prompt(30), 6)[0]]
        return
    assert model.spec.layers == ours.spec.layers and model.spec.states == ours.spec.states
    assert model.spec.mlps == ours.spec.mlps and model.spec.blocks == ours.spec.blocks
    wanted = dict(ours.named_parameters())
    for parameter, tensor in model.named_parameters():
        torch.testing.assert_close(tensor, wanted[parameter], atol=1e-6, rtol=1e-6, msg=parameter)


@pytest.mark.parametrize("name", ["lfm2", "nemotron-h"])
def test_a_quantised_file_says_what_its_floats_say(name: str, tmp_path: Path) -> None:
    """transformers' model with the rounded weights, through the engine, with a snapshot that is found."""
    theirs = copy.deepcopy(pair(name)[0])
    path = write(tmp_path / "m.gguf", CASES[name], theirs, q8)
    for tensor in theirs.state_dict().values():
        if tensor.dim() == 2:
            tensor.copy_(dequantized(q8(tensor.numpy())))
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
    with pytest.raises(ConfigError, match=r"lfm2\.attention\.head_count_kv differs among layers that have any"):
        read_facts(tmp_path / "m.gguf")


@pytest.mark.parametrize("width", [16, 32])
def test_inputs_of_value_heads_are_sorted_where_heads_are_blocks_and_where_not(width: int, tmp_path: Path) -> None:
    """A block is of 32 inputs. The layer for multi-token prediction that follows is not read."""
    layers = {"linear_value_head_dim": width, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    theirs = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_5_text"](**HYBRIDS["qwen3.5"][1] | layers)).float()
    path = write(tmp_path / "m.gguf", "qwen35", theirs, q8, predicting=True)
    spec, name = registry.model_spec(read_facts(path).config), "model.layers.0.linear_attn.out_proj.weight"
    assert spec.num_layers == 2 and spec.states[0].value_dim == width
    names = registry.name_table(spec).all_names()
    checkpoint = GGUFCheckpoint(path, spec, names)
    assert set(checkpoint.tensors) <= set(names)
    stored, codes = checkpoint.read(name), checkpoint.codes(name)
    exact = theirs.state_dict()[name]
    assert (stored - exact).abs().max() < exact.abs().max() / 127
    assert torch.equal(dealt(name, stored, theirs.config), dequantized(q8(dealt(name, exact, theirs.config).numpy())))
    assert (codes is None) == (width < 32) and (codes is None or torch.equal(codes.dequantize(), stored))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_read_their_parts(name: str, tmp_path: Path) -> None:
    theirs, _ = pair(name)
    path = write(tmp_path / "m.gguf", CASES[name], theirs)
    config = read_facts(path).config
    whole = registry.model_spec(config)

    def run(group: Group) -> list[list[int]]:
        model = registry.build(shard_model(whole, group.rank, ParallelSizes(2)), "float32", "cpu", group)
        load_weights(model, registry.name_table(model.spec), files(config, "gguf", [path]))
        return Bench(model).generate([prompt(30)], 4)[0]

    assert on_ranks(2, run) == [[greedy(theirs, prompt(30), 4)[0]]] * 2
