"""Tiny random models that read pictures or audio, saved as checkpoints with a tokenizer of bytes and a processor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = (
    *("<bos>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<image>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<IMG_CONTEXT>", "<img>", "</img>"),
    *("<fake_token_around_image>", "<global-img>", "<video>"),
    *("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
    *("<|VIDEO_START|>", "<|VIDEO_PLACEHOLDER|>", "<|VIDEO_END|>"),
    "<|AUDIO|>",
)
IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
VOCAB = 288
CONTEXT = 2048
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'audio' %}<|AUDIO|>{% else %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": IDS["<bos>"],
    "eos_token_id": IDS["<eos>"],
    "pad_token_id": IDS["<eos>"],
}
_QWEN_IDS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
}
_QWEN_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 40,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
_IDEFICS_PROCESSOR = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
_PIXTRAL = _TOWER | {"model_type": "pixtral", "image_size": 224, "patch_size": 16, "head_dim": 16}


def _mrope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}}


def _configs() -> dict[str, tuple[type[PreTrainedModel], dict[str, Any], dict[str, Any]]]:
    """model_type -> class, fields of its configuration, processor."""
    qwen3 = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    qwen3_vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    idefics = {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _TOWER | {"image_size": 56, "patch_size": 14},
        "image_token_id": IDS["<image>"],
    }
    return {
        "qwen2_vl": (
            transformers.Qwen2VLForConditionalGeneration,
            {
                "text_config": _TEXT | _mrope([2, 3, 3]),
                "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
                **_QWEN_IDS,
            },
            _QWEN_PROCESSOR,
        ),
        "qwen2_5_vl": (
            transformers.Qwen2_5_VLForConditionalGeneration,
            {
                "text_config": _TEXT | _mrope([2, 3, 3]),
                "vision_config": {
                    "depth": 3,
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_heads": 2,
                    "out_hidden_size": 64,
                    "window_size": 56,
                    "fullatt_block_indexes": [1],
                    "tokens_per_second": 2,
                },
                **_QWEN_IDS,
            },
            _QWEN_PROCESSOR,
        ),
        "qwen3_vl": (
            transformers.Qwen3VLForConditionalGeneration,
            {
                "text_config": _TEXT | {"head_dim": 16} | _mrope([4, 2, 2], mrope_interleaved=True),
                "vision_config": qwen3_vision,
                **_QWEN_IDS,
            },
            qwen3 | {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40}},
        ),
        "qwen3_vl_moe": (
            transformers.Qwen3VLMoeForConditionalGeneration,
            {
                "text_config": _TEXT
                | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
                | _mrope([4, 2, 2], mrope_interleaved=True),
                "vision_config": qwen3_vision,
                **_QWEN_IDS,
            },
            qwen3 | {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40}},
        ),
        "qwen3_5": (
            transformers.Qwen3_5ForConditionalGeneration,
            {
                "text_config": _TEXT
                | {
                    "head_dim": 32,
                    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                    "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16,
                    "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4,
                }
                | _mrope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25),
                "vision_config": {name: value for name, value in qwen3_vision.items() if name != "deepstack_visual_indexes"},
                **_QWEN_IDS,
            },
            qwen3 | {"size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 40}},
        ),
        "ernie4_5_vl_moe": (
            transformers.Ernie4_5_VLMoeForConditionalGeneration,
            {
                "text_config": _TEXT
                | {
                    "moe_num_experts": 4,
                    "moe_k": 2,
                    "moe_intermediate_size": [24, 16],
                    "moe_num_shared_experts": 2,
                }
                | _mrope([3, 3, 2]),
                "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
                **{
                    f"{modality}{place}_token_id": IDS[f"<|{modality.upper()}_{name}|>"]
                    for modality in ("image", "video")
                    for place, name in (("_start", "START"), ("", "PLACEHOLDER"), ("_end", "END"))
                },
            },
            {
                "image_processor_type": "Ernie4_5_VLMoeImageProcessor",
                "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40},
                "draw_on_frames": False,
            },
        ),
        "gemma3": (
            transformers.Gemma3ForConditionalGeneration,
            {
                "text_config": _TEXT
                | {
                    "head_dim": 16,
                    "query_pre_attn_scalar": 16,
                    "sliding_window": 12,
                    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                },
                "vision_config": {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 56,
                    "patch_size": 7,
                },
                "mm_tokens_per_image": 16,
                "image_token_index": IDS["<image_soft_token>"],
                "image_token_id": IDS["<image_soft_token>"],
                "boi_token_index": IDS["<start_of_image>"],
                "eoi_token_index": IDS["<end_of_image>"],
            },
            {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}},
        ),
        "llava": (
            transformers.LlavaForConditionalGeneration,
            {
                "text_config": _TEXT | {"model_type": "llama"},
                "vision_config": _TOWER | {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14},
                "image_token_index": IDS["<image>"],
            },
            {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 56},
                "crop_size": {"height": 56, "width": 56},
            },
        ),
        "llava_pixtral": (
            transformers.LlavaForConditionalGeneration,
            {
                "text_config": _TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
                "vision_config": _PIXTRAL,
                "image_token_index": IDS["[IMG]"],
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "full",
            },
            {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 128}, "patch_size": 16},
        ),
        "mistral3": (
            transformers.Mistral3ForConditionalGeneration,
            {
                "text_config": _TEXT | {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
                "vision_config": _PIXTRAL | {"patch_size": 14},
                "image_token_index": IDS["[IMG]"],
                "spatial_merge_size": 2,
            },
            {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 196}, "patch_size": 14},
        ),
        "internvl": (
            transformers.InternVLForConditionalGeneration,
            {
                "text_config": _TEXT | {"model_type": "qwen2"},
                "vision_config": _TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
                "image_token_id": IDS["<IMG_CONTEXT>"],
                "image_seq_length": 4,
            },
            {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56}, "max_patches": 4},
        ),
        "idefics3": (
            transformers.Idefics3ForConditionalGeneration,
            idefics,
            _IDEFICS_PROCESSOR | {"image_processor_type": "Idefics3ImageProcessor"},
        ),
        "smolvlm": (
            transformers.SmolVLMForConditionalGeneration,
            idefics,
            _IDEFICS_PROCESSOR | {"image_processor_type": "SmolVLMImageProcessor"},
        ),
        "qwen2_audio": (
            transformers.Qwen2AudioForConditionalGeneration,
            {
                "text_config": _TEXT | {"model_type": "qwen2"},
                "audio_config": {
                    "d_model": 32,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 48,
                    "num_mel_bins": 16,
                    "max_source_positions": 20,
                },
                "audio_token_index": IDS["<|AUDIO|>"],
            },
            {},
        ),
    }


def write_tokenizer(folder: Path) -> None:
    """Token i is the byte i; special tokens follow."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {ord(letter): letter for letter in letters if ord(letter) < 256}
    rest = iter(sorted((letter for letter in letters if ord(letter) >= 256), key=ord))
    vocab = {plain.get(byte) or next(rest): byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    hf.chat_template = TEMPLATE
    hf.save_pretrained(folder)


def save(kind: str, folder: Path, *, text: Mapping[str, Any] | None = None, noise: float = 0.12) -> PreTrainedModel:
    """Writes the checkpoint of a model type, with decisive logits. Returns transformers' model of it.

    Args:
        text: other fields of ``text_config``.
        noise: added to all weights: the more, the more decisive.
    """
    factory, fields, processor = _configs()[kind]
    if text is not None:
        vision = fields["vision_config"] | {"out_hidden_size": text["hidden_size"]}
        fields |= {"text_config": fields["text_config"] | text, "vision_config": vision}
    torch.manual_seed(sum(map(ord, kind)))
    config = factory.config_class(**fields)
    made: PreTrainedModel = factory._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    made.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    again: PreTrainedModel = factory.from_pretrained(folder, dtype=torch.float32)
    return again.train(False)
