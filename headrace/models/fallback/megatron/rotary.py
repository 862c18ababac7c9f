"""Rotary angles of Megatron-core models, for the positions of a step.

Megatron turns queries and keys by the angles of places 0, 1, 2 ... in its batch. A step's tokens are packed and stand
anywhere in their sequences, so the angles are made here, from the frequencies of the model's own rotary modules. (Those
modules also ask for a CUDA device, which a model on the CPU has not.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.models.fallback.refusal import Unfit


class Rotary:
    """Angles of positions as one of Megatron's rotary modules computes them.

    Args:
        module: a ``RotaryEmbedding`` or ``YarnRotaryEmbedding``.
        path: of the module, for errors.

    Raises:
        Unfit: it is of another kind.
    """

    def __init__(self, module: Any, path: str, device: torch.device) -> None:
        kind = type(module).__name__
        if kind not in ("RotaryEmbedding", "YarnRotaryEmbedding"):
            raise Unfit(f"positions of a {kind} are not one number a token", path)
        self.yarn = kind == "YarnRotaryEmbedding"
        self.interleaved = bool(module.rotary_interleaved)
        if self.yarn and self.interleaved:
            raise Unfit("YaRN with interleaved channels is not defined in Megatron", path)
        frequencies, self.magnitude = _yarn(module) if self.yarn else (module.inv_freq, 1.0)
        """The second: factor on the rotated channels, which Megatron's attention applies."""
        stretch = getattr(module, "seq_len_interpolation_factor", None)
        if stretch is not None and not self.yarn:
            frequencies = frequencies / stretch
        self.frequencies = frequencies.to(device, torch.float32)
        """``[rotated channels / 2]``"""
        self.key = (self.yarn, self.interleaved, self.magnitude, *([] if frequencies.is_meta else frequencies.tolist()))
        """Equal for modules that turn alike."""

    def angles(self, positions: torch.Tensor) -> torch.Tensor:
        """``[T] -> [T, 1, 1, rotated channels]`` float32, as Megatron's attention takes them."""
        half = positions.float()[:, None] * self.frequencies
        whole = half.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((half, half), dim=-1)
        return whole[:, None, None, :]


class StepRotary(nn.Module):
    """Replaces a rotary module that a layer calls itself (multi-head latent attention), and returns the angles of the step.

    Args:
        rotary: of the module that it stands in for.
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.angles: torch.Tensor | None = None
        """Angles of the step under way: ``[T, 1, 1, rotated channels]``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the step's angles, whatever the arguments."""
        angles = self._angles()
        return (angles, self.rotary.magnitude) if self.rotary.yarn else angles

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return len(self._angles())

    def get_cached_cos_sin(
        self, seq_len: int, offset: int = 0, dtype: torch.dtype = torch.float32, packed_seq: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and sines for Megatron's fused kernel."""
        angles, magnitude = self._angles(), self.rotary.magnitude
        return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)

    def _angles(self) -> torch.Tensor:
        if self.angles is None:
            raise ValueError("rotary angles were asked for outside a step")
        return self.angles


def _yarn(module: Any) -> tuple[torch.Tensor, float]:
    """Frequencies and magnitude (Peng et al., 2023, section 3.2), as Megatron's ``get_emb`` makes them on a CUDA device."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as theirs

    low, high = theirs._yarn_find_correction_range(
        module.beta_fast,
        module.beta_slow,
        module.dim,
        module.rotary_base,
        module.original_max_position_embeddings,
        module.correction_range_round_to_int,
    )
    trained, interpolated = module.inv_freq_extra, module.inv_freq_inter
    share = theirs._yarn_linear_ramp_mask(low, high, module.dim // 2, device=trained.device)
    magnitude = theirs._yarn_get_concentration_factor(module.scaling_factor, module.mscale, module.mscale_all_dim)
    return trained * (1 - share) + interpolated * share, float(magnitude)
