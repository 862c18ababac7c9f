"""Writes model folders with a config.json, for benchmarks with random weights; for models of pictures, a processor too.

    python benchmarks/model_configs.py OUT                     # models that fit one GPU
    python benchmarks/model_configs.py OUT --all               # larger ones too, whose KV bytes can be counted
    python benchmarks/model_configs.py OUT --tiny mimo-24l     # the same layers in small widths, for a CPU

headrace, transformers and vLLM read OUT/NAME. If OUT/vllm/NAME exists, vLLM reads that one: the same model in the fields of
vLLM's implementation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
PEER = "vllm"


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model: its config, how large, and whether one GPU of 141 GB runs it with random weights."""

    config: Callable[[bool], Json]
    """Called with whether to make it tiny."""
    peer: Callable[[Json], Json] | None = None
    """The same config in vLLM's words."""
    runs: bool = True
    files: Callable[[Json], dict[str, Json | str]] | None = None
    """Called with the config: further files by name, JSON or text."""


def mimo(layers: int, experts: int, tiny: bool) -> Json:
    """MiMo-V2-Flash: the first layer, and from the sixth on every sixth, sees everything with 4 KV heads; the others the last
    128 tokens with 8 and a sink a head. Keys are 192 wide, values 128, of which keys 64 are rotated. All MLPs but the first
    are mixtures, 8 experts of 2,048 a token.
    """
    full = [layer == 0 or (layer + 1) % 6 == 0 for layer in range(layers)]
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "dtype": "bfloat16",
        "vocab_size": 1024 if tiny else 152576,
        "hidden_size": 64 if tiny else 4096,
        "intermediate_size": 128 if tiny else 16384,
        "moe_intermediate_size": 32 if tiny else 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 8 if tiny else 64,
        "num_key_value_heads": 1 if tiny else 4,
        "swa_num_key_value_heads": 2 if tiny else 8,
        "head_dim": 24 if tiny else 192,
        "v_head_dim": 16 if tiny else 128,
        "attention_value_scale": 0.707,
        "attention_bias": False,
        "sliding_window": 16 if tiny else 128,
        "layer_types": ["full_attention" if each else "sliding_attention" for each in full],
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": 5_000_000.0},
            "sliding_attention": {**rope, "rope_theta": 10_000.0},
        },
        "n_routed_experts": 8 if tiny else experts,
        "num_experts_per_tok": 2 if tiny else 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def uneven(tiny: bool) -> Json:
    """The same with 48 query heads, and 6 KV heads in layers with a window: neither kind's KV is a multiple of the other's."""
    heads = ("num_attention_heads", "num_key_value_heads", "swa_num_key_value_heads")
    return mimo(6 if tiny else 24, 16, tiny) | dict(zip(heads, (12, 2, 3) if tiny else (48, 4, 6), strict=True))


def mimo_of_the_peer(config: Json) -> Json:
    """Returns the config in the keys of the published checkpoint, which vLLM's ``mimo_v2`` reads by name."""
    rope = config["rope_parameters"]
    windows = [int(kind == "sliding_attention") for kind in config["layer_types"]]
    renamed = {"layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps"}
    return {key: value for key, value in config.items() if key not in renamed} | {
        "hybrid_layer_pattern": windows,
        "moe_layer_freq": [int(kind == "sparse") for kind in config["mlp_layer_types"]],
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
        "swa_num_attention_heads": config["num_attention_heads"],
        "swa_head_dim": config["head_dim"],
        "swa_v_head_dim": config["v_head_dim"],
        "sliding_window_size": config["sliding_window"],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def gemma3(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, scalar: int, tiny: bool) -> Json:
    """Gemma 3's text part: five layers that see the last 1,024 tokens, then one that sees everything; norms of q and k."""
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "vocab_size": 1024 if tiny else 262208,
        "hidden_size": 64 if tiny else hidden,
        "intermediate_size": 4 * (64 if tiny else hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": 4 if tiny else heads,
        "num_key_value_heads": 2 if tiny else kv_heads,
        "head_dim": 32 if tiny else head_dim,
        "query_pre_attn_scalar": 32 if tiny else scalar,
        "sliding_window": 32 if tiny else 1024,
        "layer_types": ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def qwen25_vl_7b(tiny: bool) -> Json:
    """Qwen2.5-VL-7B-Instruct: Qwen2 with positions of three sections, and an encoder of which four layers see whole pictures
    and the others windows of 8 by 8 patches.
    """
    ids = _special_ids(512 if tiny else 151643)
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "vocab_size": 1024 if tiny else 152064,
        "hidden_size": 64 if tiny else 3584,
        "intermediate_size": 96 if tiny else 18944,
        "num_hidden_layers": 2 if tiny else 28,
        "num_attention_heads": 4 if tiny else 28,
        "num_key_value_heads": 2 if tiny else 4,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": 32768,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3] if tiny else [16, 24, 24]},
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 4 if tiny else 32,
            "hidden_act": "silu",
            "hidden_size": 32 if tiny else 1280,
            "intermediate_size": 48 if tiny else 3420,
            "num_heads": 2 if tiny else 16,
            "in_chans": 3,
            "out_hidden_size": 64 if tiny else 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3] if tiny else [7, 15, 23, 31],
            "tokens_per_second": 2,
        },
    }


QWEN_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)


def _special_ids(first: int) -> dict[str, int]:
    return {token: first + index for index, token in enumerate(QWEN_SPECIAL)}


QWEN_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}\
{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def qwen25_vl_processor(config: Json) -> dict[str, Json | str]:
    """The processor's settings as published, a template of conversations, and a tokenizer with the special tokens at the
    model's ids. It reads bytes, and writes a word for every other id: an answer of random weights has text.
    """
    special = _special_ids(config["bos_token_id"])
    vocab = {letter: index for index, letter in enumerate(_byte_letters())} | special
    taken = set(vocab.values())
    vocab |= {f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}t{i}": i for i in range(config["vocab_size"]) if i not in taken}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "preprocessor_config.json": {
            "min_pixels": 3136,
            "max_pixels": 12845056,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
        "chat_template.jinja": QWEN_TEMPLATE,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 131072,
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, "content": token, **added} for token, index in special.items()],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        },
    }


def _byte_letters() -> list[str]:
    """The letters that stand for bytes in byte-level vocabularies: printable Latin-1 as it is, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(0x100 + index) for index in range(len(others)))]


def qwen35_9b(tiny: bool) -> Json:
    """Qwen3.5's text part in the size of 9B: three gated delta rules to each attention."""
    layers = 4 if tiny else 32
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 1024 if tiny else 248320,
        "hidden_size": 64 if tiny else 4096,
        "intermediate_size": 96 if tiny else 12288,
        "num_hidden_layers": layers,
        "num_attention_heads": 4 if tiny else 16,
        "num_key_value_heads": 2 if tiny else 4,
        "head_dim": 32 if tiny else 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16 if tiny else 128,
        "linear_value_head_dim": 16 if tiny else 128,
        "linear_num_key_heads": 2 if tiny else 16,
        "linear_num_value_heads": 4 if tiny else 32,
        "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)],
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SHAPES = {
    # Half of the layers, 5 that see everything and 19 with a window, and so many experts that 26 GB hold them all and that
    # vLLM has tilings for them that were tuned on an H200.
    "mimo-24l": Shape(lambda tiny: mimo(6 if tiny else 24, 16, tiny), mimo_of_the_peer),
    "uneven-24l": Shape(uneven, mimo_of_the_peer),
    "gemma-3-12b": Shape(lambda tiny: gemma3(6 if tiny else 48, 3840, 16, 8, 256, 256, tiny)),
    "gemma-3-27b": Shape(lambda tiny: gemma3(8 if tiny else 62, 5376, 32, 16, 128, 168, tiny)),
    "qwen3.5-9b": Shape(qwen35_9b),
    "qwen2.5-vl-7b": Shape(qwen25_vl_7b, files=qwen25_vl_processor),
    "mimo-v2-flash": Shape(lambda tiny: mimo(8 if tiny else 48, 256, tiny), mimo_of_the_peer, runs=False),
}


def write(out: Path, names: list[str], tiny: bool = False) -> list[Path]:
    """Writes the folders of some shapes; returns those that everybody but vLLM reads."""
    folders = []
    for name in names:
        shape = SHAPES[name]
        config = shape.config(tiny)
        folders.append(_write(out / name, config))
        for file, content in (shape.files(config) if shape.files is not None else {}).items():
            _dump(out / name / file, content)
        if shape.peer is not None:
            _write(out / PEER / name, shape.peer(config))
    return folders


def _write(folder: Path, config: Json) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    _dump(folder / "config.json", config)
    return folder


def _dump(file: Path, content: Json | str) -> None:
    file.write_text(content if isinstance(content, str) else json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write them in")
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(SHAPES)}")
    parser.add_argument("--all", action="store_true", help="also those that one GPU cannot hold")
    parser.add_argument("--tiny", action="store_true", help="the same patterns in small widths")
    options = parser.parse_args()
    for name in options.names:
        if name not in SHAPES:
            parser.error(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    if options.names and options.all:
        parser.error("--all is for all shapes, not for some by name")
    names = options.names or [name for name, shape in SHAPES.items() if shape.runs or options.all]
    for folder in write(options.out, names, options.tiny):
        print(folder)


if __name__ == "__main__":
    main()
