"""Rotary embedding tables: the cosines and sines of every position, for each way of scaling that models use.

The frequencies equal those of Hugging Face's ``ROPE_INIT_FUNCTIONS``, number for number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from headrace.errors import ConfigError
from headrace.model_spec import RopeSpec

_FIRST_LENGTH = 1024

Frequencies = Callable[[torch.Tensor], torch.Tensor]
"""Positions ``[n]`` int64 -> angles per position step, ``[rotary_dim / 2]`` or ``[n, rotary_dim / 2]`` float32."""


class RotaryTable:
    """``cos_sin[p]`` of positions 0, 1, 2 ... for one rope configuration, in float32; grows as positions come."""

    def __init__(self, rope: RopeSpec, rotary_dim: int, device: str | torch.device) -> None:
        self.rotary_dim = rotary_dim
        self._frequencies, self.attention_factor = frequencies(rope, rotary_dim)
        self._table = torch.empty(0, rotary_dim, dtype=torch.float32, device=device)
        self.sectioned = bool(rope.sections)
        self._section_of = torch.tensor(_section_of(rope) * 2, dtype=torch.int64, device=device)
        """``[rotary_dim]``: column of the table -> its section."""

    def reserve(self, length: int) -> None:
        """Makes positions ``[0, length)`` ready. The table's address changes when it grows."""
        if length <= len(self._table):
            return
        grown = max(_FIRST_LENGTH, 1 << (length - 1).bit_length())
        positions = torch.arange(grown, dtype=torch.int64)
        angles = positions[:, None].float() * self._frequencies(positions)
        table = torch.cat((angles.cos(), angles.sin()), dim=1) * self.attention_factor
        self._table = table.to(self._table.device)

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """``[T]`` or ``[3, T]`` int64 ``-> [T, rotary_dim]``: a token's cosines, then its sines. Positions must be reserved.

        Positions of rank 2 are those in time, height and width, of which each angle takes the one of its section.
        """
        if positions.dim() == 1:
            return self._table.index_select(0, positions)
        return self._table.gather(0, positions.index_select(0, self._section_of).T)


def _section_of(rope: RopeSpec) -> list[int]:
    """Angle -> its section: of time (0), height (1) and width (2)."""
    if rope.time_last:
        time, height, _ = rope.sections
        return [1, 2] * height + [0] * time
    if not rope.interleaved:
        return [section for section, size in enumerate(rope.sections) for _ in range(size)]
    angles = [0] * sum(rope.sections)
    for section, size in list(enumerate(rope.sections))[1:]:
        for angle in range(section, 3 * size, 3):
            angles[angle] = section
    return angles


def frequencies(rope: RopeSpec, rotary_dim: int) -> tuple[Frequencies, float]:
    """Returns the angles of a rope configuration, and the factor on the cosines and sines.

    Raises:
        ConfigError: the kind is unknown, or a parameter is missing or not a number; the message names it.
    """
    if rope.kind not in _KINDS:
        raise ConfigError(
            f"rope_parameters.rope_type {rope.kind!r} is not supported; supported are: {', '.join(_KINDS)}", "rope_parameters"
        )
    return _KINDS[rope.kind](rope, rotary_dim)


def _number(rope: RopeSpec, name: str, default: float | None = None) -> float:
    value = rope.parameters.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or not _is_positive(value):
        problem = "missing" if value is None else f"{value!r}, not a positive number"
        raise ConfigError(f"rope_parameters.{name} of rope_type {rope.kind!r} is {problem}", "rope_parameters")
    return value


def _inverse(base: float, dim: int) -> torch.Tensor:
    """``base ** (-2 i / dim)`` for i = 0 ... dim / 2 - 1 (Su et al., 2021)."""
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _fixed(inverse: torch.Tensor, factor: float = 1.0) -> tuple[Frequencies, float]:
    return lambda positions: inverse, factor


def _default(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    return _fixed(_inverse(rope.theta, dim))


def _proportional(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    """The first ``partial_rotary_factor`` of the angles as for all of the head, the others zero: Gemma 4."""
    turned = int(_number(rope, "partial_rotary_factor", 1.0) * dim // 2)
    inverse = _inverse(rope.theta, dim) / _number(rope, "factor", 1.0)
    return _fixed(torch.where(torch.arange(dim // 2) < turned, inverse, 0.0))


def _linear(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    """Position interpolation (Chen et al., 2023)."""
    return _fixed(_inverse(rope.theta, dim) / _number(rope, "factor"))


def _dynamic(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    """NTK-aware scaling that grows with the position beyond the length the model was trained for.

    The base of a token depends on its own position and on nothing that comes later: so a key in the cache stays right,
    however its prompt was cut in chunks or shared. It is what Hugging Face computes when tokens come one by one.
    """
    factor = _number(rope, "factor")
    trained = int(_number(rope, "max_position_embeddings"))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim

    def angles(positions: torch.Tensor) -> torch.Tensor:
        lengths = (positions + 1).clamp(min=trained)
        growth = (factor * lengths / trained) - (factor - 1)
        bases = rope.theta * growth ** (dim / (dim - 2))
        bases = torch.where(lengths > trained, bases, torch.tensor(rope.theta, dtype=torch.float32))
        return 1.0 / (bases[:, None] ** exponents)

    return angles, 1.0


def _llama3(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    """Llama 3.1: long waves are interpolated, short ones kept, those between blended."""
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    trained = _number(rope, "original_max_position_embeddings")
    if low == high:
        raise ConfigError("rope_parameters: low_freq_factor and high_freq_factor must differ", "rope_parameters")
    inverse = _inverse(rope.theta, dim)
    wavelengths = 2 * math.pi / inverse
    scaled = torch.where(wavelengths > trained / low, inverse / factor, inverse)
    smooth = (trained / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return _fixed(torch.where(between, blended, scaled))


def _yarn(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    """YaRN (Peng et al., 2023): interpolation by wavelength, and a temperature on the attention logits."""
    trained = _number(rope, "original_max_position_embeddings")
    longest = rope.parameters.get("max_position_embeddings")
    factor = _number(rope, "factor", None if longest is None else longest / trained)
    fast, slow = _number(rope, "beta_fast", 32), _number(rope, "beta_slow", 1)

    def channel(rotations: float) -> float:
        """The channel that turns ``rotations`` times within the trained length."""
        return (dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    first, last = channel(fast), channel(slow)
    if rope.parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    waves = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    return _fixed(1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept, _yarn_attention_factor(rope.parameters, factor))


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    explicit = parameters.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1)


def _longrope(rope: RopeSpec, dim: int) -> tuple[Frequencies, float]:
    """LongRoPE (Ding et al., 2024): factors for sequences up to the length the model was trained for, others beyond it.

    A sequence that outgrew the length would turn all its tokens anew, those too whose keys are in the cache. So the choice
    is made once, for all sequences, by the longest context there may be.
    """
    name = "long_factor" if rope.long_factors else "short_factor"
    factors = rope.parameters.get(name)
    if not isinstance(factors, list | tuple) or len(factors) * 2 != dim or not all(map(_is_positive, factors)):
        raise ConfigError(
            f"rope_parameters.{name} of rope_type 'longrope' must be {dim // 2} positive numbers", "rope_parameters"
        )
    trained = _number(rope, "original_max_position_embeddings")
    factor = _number(rope, "factor", _number(rope, "max_position_embeddings") / trained)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    explicit = rope.parameters.get("attention_factor")
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    return _fixed(inverse, attention if explicit is None else float(explicit))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


_KINDS: dict[str, Callable[[RopeSpec, int], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
