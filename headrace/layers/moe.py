"""Mixture of experts (MoE), in place of a layer's MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.config import MemoryLine
from headrace.kernels.moe import choose_experts, held_experts, moe_mlp, router_logits
from headrace.kernels.moe.codes import ExpertCodes
from headrace.kernels.moe.reference import ExpertFactors
from headrace.layers.linear import Linear, packed_memory
from headrace.layers.lora import ExpertTables
from headrace.layers.mlp import GatedMLP, SquaredMLP, build_mlp
from headrace.layers.stored import StoredMatrix
from headrace.model_spec import MoeSpec


def _empty(*shape: int, dtype: torch.dtype, device: str | torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class ExpertRouter(nn.Module):
    """Chooses a token's experts. Its parameters are float32 in any model, and so is what is computed with them."""

    def __init__(self, hidden_size: int, spec: MoeSpec, *, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.weight = _empty(spec.num_experts, hidden_size, dtype=torch.float32, device=device)
        """``[num_experts, hidden]``"""
        self.bias: nn.Parameter | None = None
        self.e_score_correction_bias: nn.Parameter | None = None
        if spec.router_bias:
            self.bias = _empty(spec.num_experts, dtype=torch.float32, device=device)
        if spec.correction_bias:
            self.e_score_correction_bias = _empty(spec.num_experts, dtype=torch.float32, device=device)
        self.batch_invariant = False
        """Each token's result is bitwise independent of the other tokens."""
        self.record: torch.Tensor | None = None
        """``[tokens of any step, top_k]`` of integers: takes the experts of each step's tokens. None: nobody asks for them."""
        self.record_weights: torch.Tensor | None = None
        """The same of float32 weights."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, hidden]`` -> experts ``[T, top_k]`` int32, weights ``[T, top_k]`` float32."""
        return self.choose(x)[:2]

    def choose(self, x: torch.Tensor, readers: Experts | None = None) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """``forward``, and what it prepares of the same call of ``readers``, if they get x."""
        gate_up = None if readers is None or readers.spec.held is not None else readers.gate_up
        parameters = self.weight, self.bias, self.e_score_correction_bias
        experts, weights, prepared = choose_experts(x, *parameters, self.spec, gate_up, batch_invariant=self.batch_invariant)
        if self.record is not None:
            self.record[: len(experts)].copy_(experts)
        if self.record_weights is not None:
            self.record_weights[: len(weights)].copy_(weights)
        return experts, weights, prepared


class SharedExpertGate(nn.Module):
    """The weight of a token's shared experts, in float32."""

    def __init__(self, hidden_size: int, *, device: str | torch.device) -> None:
        super().__init__()
        self.weight = _empty(1, hidden_size, dtype=torch.float32, device=device)
        self.batch_invariant = False
        """Each token's result is bitwise independent of the other tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden]`` -> ``[T, 1]`` in x's dtype."""
        return torch.sigmoid(router_logits(x, self.weight, None, batch_invariant=self.batch_invariant)).to(x.dtype)


class Experts(nn.Module):
    """The experts' weights, stacked. A tensor-parallel rank has a slice of each expert, or some of the experts, and gives
    its part of the sum over ranks."""

    gate_up_proj: nn.Parameter
    """``[num_held, first_outputs, hidden]``: an expert's gate, then its up; of experts without gates the up."""
    down_proj: nn.Parameter
    """``[num_held, hidden, intermediate_size]``"""

    def __init__(self, hidden_size: int, spec: MoeSpec, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        count, inner = spec.num_held, spec.intermediate_size
        self.shapes = {"gate_up_proj": (count, spec.first_outputs, hidden_size), "down_proj": (count, hidden_size, inner)}
        self.method: ExpertsMethod = ExpertsMethod()
        self.method.allocate(self, dtype, device)
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        if spec.bias:
            self.gate_up_proj_bias = _empty(count, spec.first_outputs, dtype=dtype, device=device)
            self.down_proj_bias = _empty(count, hidden_size, dtype=dtype, device=device)
        self.batch_invariant = False
        """Each token's result is bitwise independent of the other tokens."""
        self.whole_steps = True
        """``forward`` gets all tokens of a step, in their order."""
        self.lora: ExpertTables | None = None
        """Additions of adapters. They are no part of the weights."""

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        plus: torch.Tensor | None = None,
        prepared: Any = None,
    ) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``; experts and weights as a Router gives them, and what it has prepared for this call.
        ``plus`` of the same shape is added, each rank its own."""
        if self.spec.held is not None:
            experts = held_experts(experts, *self.spec.held)
        adapters = None if self.lora is None else self.lora.factors(len(x))
        return self.method.apply(self, x, experts, weights, plus, adapters, prepared)

    def gate_up(self) -> torch.Tensor | ExpertCodes:
        """Returns the first matrices as ``moe_mlp`` takes them."""
        return self.method.factors(self)[0]

    def memory(self) -> list[MemoryLine]:
        return self.method.memory(self)


class ExpertsMethod:
    """The matrices of one ``Experts``, as float parameters ``gate_up_proj`` and ``down_proj``. Number formats override it."""

    format = "floats"
    takes_codes = False
    """``load`` takes the codes of stored matrices, in place of floats."""
    constants: tuple[str, ...] = ()
    """Ends of the names of buffers that belong to the format: nothing writes them anew when weights are read again."""

    def allocate(self, layer: Experts, dtype: torch.dtype, device: str | torch.device) -> None:
        for name, shape in layer.shapes.items():
            setattr(layer, name, nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False))

    def load(self, layer: Experts, matrix: str, stored: StoredMatrix, expert: int | None = None, start: int = 0) -> None:
        """Fills rows of ``matrix`` from ``start`` on.

        Args:
            expert: its index; None: ``stored`` is stacked, ``[num_experts, N, K]``.
        """
        whole, rows = layer.get_parameter(matrix).data, stored.read()
        whole = whole if expert is None else whole[expert]
        whole.narrow(-2, start, rows.shape[-2]).copy_(rows)

    def rounds(self, matrix: str) -> bool:
        """Returns whether ``load_floats`` can round new values to the format of a matrix. Floats are parameters, which updates
        write themselves."""
        return False

    def load_floats(self, layer: Experts, matrix: str, floats: torch.Tensor, expert: int | None, start: int) -> None:
        """Rounds new values into the memory of the present ones, which captured graphs refer to. Arguments as of ``load``."""
        raise TypeError(f"new values are not rounded to {self.format}")

    def apply(
        self,
        layer: Experts,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        plus: torch.Tensor | None,
        adapters: ExpertFactors | None = None,
        prepared: Any = None,
    ) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``; ``experts`` and ``weights`` ``[T, top_k]``. ``plus`` of x's shape is added, and what
        the step's adapters add."""
        matrices, biases = self.factors(layer), (layer.gate_up_proj_bias, layer.down_proj_bias)
        more: dict[str, Any] = {"adapters": adapters, "prepared": prepared, "batch_invariant": layer.batch_invariant}
        return moe_mlp(x, experts, weights, *matrices, layer.spec, *biases, plus=plus, **more)

    def factors(self, layer: Experts) -> tuple[torch.Tensor | ExpertCodes, torch.Tensor | ExpertCodes]:
        """Returns the matrices gate and up, and down, as ``moe_mlp`` takes them."""
        return layer.gate_up_proj, layer.down_proj

    def dequantize(self, layer: Experts, matrix: str) -> torch.Tensor:
        """Returns what ``apply`` multiplies by, ``[num_experts, N, K]`` float32."""
        return layer.get_parameter(matrix).detach().float()

    def error(self) -> float:
        """Returns the root mean square of (held - exact weights) over that of the exact ones, of all that was loaded."""
        return 0.0

    def memory(self, layer: Experts) -> list[MemoryLine]:
        """Reports the layer's buffers."""
        return packed_memory(layer, self.format)


class MoeMLP(nn.Module):
    """A router, its experts, and the shared experts that see every token."""

    def __init__(self, hidden_size: int, spec: MoeSpec, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        width = spec.latent_size or hidden_size
        self.gate = ExpertRouter(hidden_size, spec, device=device)
        self.experts = Experts(width, spec, dtype=dtype, device=device)
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if spec.latent_size:
            self.fc1_latent_proj = Linear(hidden_size, width, dtype=dtype, device=device)
            self.fc2_latent_proj = Linear(width, hidden_size, dtype=dtype, device=device)
        self.shared_experts: GatedMLP | SquaredMLP | None = None
        if spec.shared is not None:
            self.shared_experts = build_mlp(hidden_size, spec.shared, dtype, device)
        self.shared_expert_gate = SharedExpertGate(hidden_size, device=device) if spec.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        shared = None if self.shared_experts is None else self.shared_experts(x)
        if shared is not None and self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x)
        out: torch.Tensor
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            experts, weights, prepared = self.gate.choose(x, self.experts)
            out = self.experts(x, experts, weights, shared, prepared)
            return out
        out = self.fc2_latent_proj(self.experts(self.fc1_latent_proj(x), *self.gate(x)))
        return out if shared is None else out + shared
