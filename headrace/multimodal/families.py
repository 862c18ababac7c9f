"""The processor of a model, by its type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.multimodal.audio import AudioRules
from headrace.multimodal.ernie4_5_vl import ErnieRules
from headrace.multimodal.gemma3 import Gemma3Rules
from headrace.multimodal.idefics3 import Idefics3Rules, SmolVLMRules
from headrace.multimodal.internvl import InternVLRules
from headrace.multimodal.llava import LlavaRules
from headrace.multimodal.pixtral import PixtralRules
from headrace.multimodal.qwen_vl import Qwen3Rules, Qwen25Rules, QwenRules
from headrace.multimodal.rules import MediaRules

_RULES: dict[str, Callable[[Path, Any], MediaRules]] = {
    "qwen2_vl": lambda folder, config: QwenRules(folder, config.vision_config),
    "qwen2_5_vl": lambda folder, config: Qwen25Rules(folder, config.vision_config),
    "qwen3_vl": lambda folder, config: Qwen3Rules(folder, config.vision_config),
    "qwen3_vl_moe": lambda folder, config: Qwen3Rules(folder, config.vision_config),
    "qwen3_5": lambda folder, config: Qwen3Rules(folder, config.vision_config),
    "qwen3_5_moe": lambda folder, config: Qwen3Rules(folder, config.vision_config),
    "ernie4_5_vl_moe": lambda folder, config: ErnieRules(folder, config.vision_config),
    "gemma3": Gemma3Rules,
    "llava": lambda folder, config: _LLAVA.get(config.vision_config.model_type, LlavaRules)(folder, config),
    "mistral3": PixtralRules,
    "internvl": InternVLRules,
    "idefics3": Idefics3Rules,
    "smolvlm": SmolVLMRules,
    "qwen2_audio": lambda folder, config: AudioRules(),
}
_LLAVA: dict[str, Callable[[Path, Any], MediaRules]] = {"pixtral": PixtralRules}
"""Rules by the type of the vision part, where they differ from the default."""


_REASONS = {
    "paligemma": "all tokens of its prompts see each other, and headrace's prompts are cut in chunks",
}


def why_text_alone(config: Any) -> str:
    """Explains why a model with a part for media reads none."""
    heard, seen = (getattr(config, part, None) is not None for part in ("audio_config", "vision_config"))
    media = "audio clips" if heard and not seen else "pictures"
    if config.model_type in _RULES:
        return f"{media} of {config.model_type} are for its native implementation, which does not run here (model_impl)"
    reason = _REASONS.get(config.model_type)
    return f"{media} of {config.model_type} are not supported" + (f": {reason}" if reason else "")


def media_rules(model_type: str, folder: Path, config: Any) -> MediaRules:
    """Raises: ConfigError: the model has no processor that can be used."""
    if model_type not in _RULES:
        raise ConfigError(f"pictures of {model_type} are not supported; supported are: {', '.join(_RULES)}", "model")
    try:
        return _RULES[model_type](folder, config)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder} has no processor of {model_type} that can be used: {error}", "model") from error
