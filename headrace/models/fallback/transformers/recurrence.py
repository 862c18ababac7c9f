"""The functions of transformers' modeling files that carry a state from token to token, as calls of headrace's kernels.

Each family's file has these functions in its globals, under the same names and with the same arguments. Without a cache they
take a whole sequence, ``[1, T, ...]``; here the tokens are those of a step's rows, and the state of each row is in its block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.functional import silu

from headrace.kernels.state import StateMetadata, causal_conv, delta_rule, selective_scan, state_space
from headrace.model_spec import ConvSpec, StateSpec
from headrace.models.fallback.refusal import Unfit

_LINEAR = 20.0
"""softplus(x) is x from here on."""


class Recurrence(ABC):
    """One call. Results are in the function's own layout.

    Raises:
        Unfit: the function is called in a way that headrace's kernels do not support.
    """

    theirs: Callable[[], Any]
    """Computes the call by the library's function, over all tokens as one sequence."""
    tokens: int
    dtype: torch.dtype
    """The result's."""

    @abstractmethod
    def spec(self, index: int) -> StateSpec:
        """Returns the geometry of the state, as state layer ``index``."""

    @abstractmethod
    def run(self, state: torch.Tensor, rows: StateMetadata) -> torch.Tensor:
        """Computes the call, and advances the states of the rows, ``[blocks, ...]``."""

    @abstractmethod
    def alone(self) -> torch.Tensor:
        """Computes something of the result's shape in which no token depends on another: a token that is not a number gives
        one that is not."""

    def returned(self, out: torch.Tensor) -> Any:
        """Returns what the library's function returns."""
        return out


def _refuse(rest: Mapping[str, Any], **arguments: Any) -> None:
    """Refuses arguments that are given. ``rest``: those that the library's function ignores, but for some."""
    meant = {name: rest.get(name) for name in ("cu_seqlens", "seq_idx", "z")}
    for name, value in (arguments | meant).items():
        if value is not None and value is not False:
            raise Unfit(f"its state takes {name}, to which headrace's has no equal")


def _one(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, ...] -> [...]``"""
    if tensor.shape[0] != 1:
        raise Unfit(f"the batch of its state layers is {tensor.shape[0]}: a step's tokens are packed in 1")
    return tensor[0]


def _numbers(*tensors: torch.Tensor) -> torch.Tensor | float:
    """``[T, ...]`` each -> ``[T]`` zeros, and NaN for tokens that have one."""
    return sum(0.0 * tensor.float().flatten(1).sum(1) for tensor in tensors)


class Convolution(Recurrence):
    """``causal_conv1d_fn``"""

    def __init__(
        self,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **rest: Any,
    ) -> None:
        _refuse(rest)
        if activation not in (None, "silu", "swish"):
            raise Unfit(f"its convolution has the activation {activation}, which headrace's has not")
        self._x = _one(hidden_states).transpose(0, 1).to(weight.dtype)
        self._weight, self._bias, self._silu = weight, bias, activation is not None
        self.tokens, self.dtype = len(self._x), hidden_states.dtype

    def spec(self, index: int) -> StateSpec:
        channels, taps = self._weight.shape
        conv = ConvSpec(taps, (("x", channels),), self._bias is not None, "silu" if self._silu else None)
        return StateSpec(index, "conv", 0, 0, 0, 0, conv)

    def run(self, state: torch.Tensor, rows: StateMetadata) -> torch.Tensor:
        out = causal_conv(self._x, self._weight, self._bias, "silu" if self._silu else None, state, rows)
        return self._laid_out(out)

    def alone(self) -> torch.Tensor:
        out = self._x * self._weight[:, -1] if self._bias is None else self._x * self._weight[:, -1] + self._bias
        return self._laid_out(silu(out) if self._silu else out)

    def _laid_out(self, out: torch.Tensor) -> torch.Tensor:
        return out.to(self.dtype).transpose(0, 1)[None]


class DeltaRule(Recurrence):
    """``chunk_gated_delta_rule`` and ``chunk_kda``, whose decay is one for each key channel. Their decay is a logarithm and
    their beta a factor: both are taken back to what the kernels make them of."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **rest: Any,
    ) -> None:
        _refuse(rest, initial_state=initial_state, output_final_state=output_final_state)
        if not use_qk_l2norm_in_kernel:
            raise Unfit("its delta rule takes queries and keys of any length, and headrace's scales them to 1")
        self._q, self._k, self._v, self._g, self._beta = (_one(x) for x in (query, key, value, g, beta))
        self.tokens, self.dtype = len(self._v), value.dtype

    def spec(self, index: int) -> StateSpec:
        (key_heads, key_dim), (heads, value_dim) = self._k.shape[1:], self._v.shape[1:]
        return StateSpec(index, "kda" if self._g.dim() == 3 else "gdn", heads, key_heads, key_dim, value_dim, None)

    def run(self, state: torch.Tensor, rows: StateMetadata) -> torch.Tensor:
        qkv = torch.cat([x.flatten(1) for x in (self._q, self._k, self._v)], dim=1).float()
        fade = -self._g.flatten(1).float()
        decay = torch.where(fade > _LINEAR, fade, torch.expm1(fade.clamp(max=_LINEAR)).log())
        beta = torch.logit(self._beta.float() / 2)
        zeros = fade.new_zeros(decay.shape[1])
        out = delta_rule(qkv, decay, beta, zeros[: self._v.shape[1]], zeros, state, rows, beta_factor=2)
        return out.view(1, *self._v.shape).to(self.dtype)

    def alone(self) -> torch.Tensor:
        out = self._v * self._beta[:, :, None] + _at(_numbers(self._q, self._k, self._g), self._v)
        return out.to(self.dtype)[None]

    def returned(self, out: torch.Tensor) -> tuple[torch.Tensor, None]:
        return out, None


class StateSpace(Recurrence):
    """``mamba_chunk_scan_combined``, of Mamba-2."""

    def __init__(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        initial_states: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **rest: Any,
    ) -> None:
        _refuse(rest, initial_states=initial_states, return_final_states=return_final_states)
        if not dt_softplus:
            raise Unfit("its time steps do not go through softplus")
        self._x, self._dt, self._b, self._c = (_one(x) for x in (hidden_states, dt, B, C))
        self._rate = A
        self._d, self._bias = (A.new_zeros(A.shape) if one is None else one for one in (D, dt_bias))
        if A.dim() != 1 or self._d.shape != A.shape or self._bias.shape != A.shape:
            raise Unfit("its heads do not have one rate, one D and one bias each")
        self._limit = (float(dt_limit[0]), float(dt_limit[1]))
        # The library's function returns what it has summed up.
        self.tokens, self.dtype = len(self._x), torch.float32

    def spec(self, index: int) -> StateSpec:
        (heads, width), (groups, size) = self._x.shape[1:], self._b.shape[1:]
        return StateSpec(index, "ssd", heads, groups, size, width, None, dt_limit=self._limit)

    def run(self, state: torch.Tensor, rows: StateMetadata) -> torch.Tensor:
        xbc = torch.cat([x.flatten(1) for x in (self._x, self._b, self._c)], dim=1).float()
        rate, d, bias = (-self._rate.float()).log(), self._d.float(), self._bias.float()
        return state_space(xbc, self._dt.float(), rate, d, bias, state, rows, self._limit).view(1, *self._x.shape)

    def alone(self) -> torch.Tensor:
        return (self._x.float() * self._d.float()[:, None] + _at(_numbers(self._dt, self._b, self._c), self._x))[None]


class SelectiveScan(Recurrence):
    """``selective_scan_fn``, of Mamba-1."""

    def __init__(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        use_mambapy: bool = False,
        use_associative_scan: bool = False,
        **rest: Any,
    ) -> None:
        _refuse(rest, return_last_state=return_last_state)
        if not delta_softplus:
            raise Unfit("its time steps do not go through softplus")
        self._x, self._dt, self._b, self._c = (_one(x).transpose(0, 1) for x in (hidden_states, dt, B, C))
        self._z = None if z is None else _one(z).transpose(0, 1)
        self._rate = A
        self._d, self._bias = (A.new_zeros(len(A)) if one is None else one for one in (D, delta_bias))
        self.tokens, self.dtype = len(self._x), hidden_states.dtype

    def spec(self, index: int) -> StateSpec:
        channels, size = self._rate.shape
        return StateSpec(index, "mamba1", channels, 0, size, 1, None)

    def run(self, state: torch.Tensor, rows: StateMetadata) -> torch.Tensor:
        x, dt, b, c = (x.float() for x in (self._x, self._dt, self._b, self._c))
        rate, d, bias = (each.float() for each in (self._rate, self._d, self._bias))
        return self._laid_out(selective_scan(x, dt, b, c, rate, d, bias, state, rows))

    def alone(self) -> torch.Tensor:
        return self._laid_out(self._x.float() * self._d.float() + _at(_numbers(self._dt, self._b, self._c), self._x))

    def _laid_out(self, out: torch.Tensor) -> torch.Tensor:
        out = out if self._z is None else out * silu(self._z.float())
        return out.to(self.dtype).transpose(0, 1)[None]


def _at(numbers: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor | float:
    """``[T]`` as it is added to ``[T, ...]``."""
    return numbers.view(-1, *(1,) * (like.dim() - 1)) if isinstance(numbers, torch.Tensor) else numbers


FUNCTIONS: Mapping[str, type[Recurrence]] = {
    "causal_conv1d_fn": Convolution,
    "torch_chunk_gated_delta_rule": DeltaRule,
    "chunk_kimi_delta_attention": DeltaRule,
    "mamba2_chunk_scan": StateSpace,
    "mamba_selective_scan": SelectiveScan,
}
"""Names in modeling files -> what they compute. Each module calls them alike for one token and for many."""
