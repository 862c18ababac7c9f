"""Reading Mamba-2 layers from Hugging Face configurations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.errors import ConfigError
from headrace.model_spec import ConvSpec, StateSpec
from headrace.model_spec.integers import is_number
from headrace.models.hf_config import HFConfig, required, uniform
from headrace.models.moe_config import must_be


def mamba2_specs(config: HFConfig, count: int, inner: int | None = None) -> tuple[StateSpec, ...]:
    """Returns the state layers of configurations with ``mamba_*`` fields.

    Args:
        count: their number.
        inner: channels of all heads together; None: ``mamba_expand`` times as many as a token has.
    """
    inner = required(config, "mamba_expand") * required(config, "hidden_size") if inner is None else inner
    heads, head_dim = required(config, "mamba_n_heads"), uniform(config, "mamba_d_head", "auto")
    width = inner // heads if head_dim == "auto" else required(config, "mamba_d_head")
    if heads * width != inner:
        raise ConfigError(f"config: mamba_n_heads {heads} of mamba_d_head {width} are not {inner} channels", "mamba_n_heads")
    must_be(config, "hidden_act", "silu")
    return state_space_specs(
        count,
        heads=heads,
        width=width,
        groups=required(config, "mamba_n_groups"),
        size=required(config, "mamba_d_state"),
        taps=required(config, "mamba_d_conv"),
        bias=bool(uniform(config, "mamba_conv_bias", True)),
        dt_limit=numbers(config, "time_step_limit", (0.0, math.inf)),
    )


def state_space_specs(
    count: int, *, heads: int, width: int, groups: int, size: int, taps: int, bias: bool, dt_limit: Sequence[float]
) -> tuple[StateSpec, ...]:
    """Returns ``count`` layers of one geometry. ``bias``: of the convolution of ``taps`` tokens."""
    parts = (("x", heads * width), ("B", groups * size), ("C", groups * size))
    conv = ConvSpec(taps, parts, bias=bias, activation="silu")
    least, most = dt_limit
    return tuple(
        StateSpec(index, "ssd", heads, groups, key_dim=size, value_dim=width, conv=conv, dt_limit=(least, most))
        for index in range(count)
    )


def numbers(config: HFConfig, name: str, default: Sequence[float]) -> tuple[float, ...]:
    """Reads a field that is a list of numbers, as many as there are in ``default``."""
    given = getattr(config, name, None)
    values = default if given is None else given
    if (
        not isinstance(values, list | tuple)
        or len(values) != len(default)
        or not all(is_number(value) or value == math.inf for value in values)
    ):
        raise ConfigError(f"config: {name} must be {len(default)} numbers, not {given!r}", name)
    return tuple(map(float, values))
