"""Tokens of a vocabulary that stand for media."""

from __future__ import annotations

from typing import Any

_MODALITIES = ("image", "video", "audio")


def configured_media_tokens(config: Any) -> dict[int, str]:
    """Token id -> modality, as the model's configuration names them, whether headrace reads the modality or not."""
    named = {f"{modality}_token_{suffix}": modality for modality in _MODALITIES for suffix in ("id", "index")}
    found = ((getattr(config, name, None), modality) for name, modality in named.items())
    return {token: modality for token, modality in found if isinstance(token, int)}
