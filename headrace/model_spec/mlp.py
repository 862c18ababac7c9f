"""The part of a layer that follows attention."""

from __future__ import annotations

import dataclasses
from typing import Literal

from headrace.errors import ConfigError, ContradictionError

CLAMPED_SWIGLU = "clamped_swiglu"
"""``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``: what gpt-oss has for a gate."""


@dataclasses.dataclass(frozen=True)
class DenseSpec:
    """A gated MLP: ``down(act(gate(x)) * up(x))``."""

    intermediate_size: int
    """0: the layer ends with its mixer."""
    act: str = "silu"
    """Name of the activation at Hugging Face, or CLAMPED_SWIGLU."""
    bias: bool = False
    """All three matrices have one."""
    gated: bool = True
    """False: the MLP is ``down(act(up(x)))``."""
    alpha: float = 1.702
    limit: float = 7.0
    """alpha and limit are CLAMPED_SWIGLU's."""

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of every matrix."""
        if not self.intermediate_size:
            return []
        return [((1 + self.gated) * self.intermediate_size, hidden_size), (hidden_size, self.intermediate_size)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """The router and the experts of one layer.

    A token's experts are the ``top_k`` of its scores; their outputs are summed, each times its weight: its score,
    normalised if ``normalize``, times ``routed_scale``. Shared experts are added with weight 1, or that of ``shared_gate``.

    Raises:
        ContradictionError: the numbers do not fit together.
        ConfigError: a limit is not above 0.
    """

    num_experts: int
    top_k: int
    """Experts of a token, shared ones not counted."""
    intermediate_size: int
    """Width of one expert."""
    shared: DenseSpec | None = None
    """The shared experts, all of them one MLP that every token goes through."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by the sigmoid of a projection of the token to one number."""
    vision: MoeSpec | None = None
    """The experts of tokens of items, which do not go through these; None: all tokens do."""
    act: str = "silu"
    """Activation of the gate: a name at Hugging Face, or CLAMPED_SWIGLU. Of experts without gates, ``relu2``."""
    gated: bool = True
    """False: an expert is ``down(act(up(x)))``."""
    latent_size: int = 0
    """Width of what the experts read and make, to which tokens are projected, and back; 0: they read the tokens."""
    alpha: float = 1.702
    limit: float = 7.0
    """alpha and limit are CLAMPED_SWIGLU's."""
    bias: bool = False
    """Experts have biases."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits over all experts into scores."""
    router_bias: bool = False
    """The router's logits have a bias."""
    correction_bias: bool = False
    """A bias an expert that is added to scores when experts are chosen, and not to their weights (Wang et al., 2024)."""
    num_groups: int = 1
    """Number of equal groups of experts, of which a token's experts come from ``top_groups``."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """A group counts for its best score, or for the sum of its best two."""
    normalize: bool = True
    """Weights of a token are divided by their sum."""
    least_sum: float = 1e-20
    """A sum below this counts as this."""
    added_sum: float = 0.0
    """Added to the sum."""
    routed_scale: float = 1.0
    held: tuple[int, int] | None = None
    """The experts ``[start, stop)`` whose matrices a tensor-parallel rank holds; None: all. The router has all in any case."""

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise ContradictionError(
                f"mixture of experts: {self.num_experts} experts do not make {self.num_groups} equal groups", "num_groups"
            )
        if self.top_groups > self.num_groups:
            raise ContradictionError(
                f"mixture of experts: top_groups {self.top_groups} is more than the {self.num_groups} groups there are",
                "top_groups",
            )
        if self.group_score == "top2" and self.num_groups > 1 and self.group_size < 2:
            raise ContradictionError("mixture of experts: a group of one expert has no best two", "num_groups")
        if self.top_k > self.top_groups * self.group_size:
            raise ContradictionError(
                f"mixture of experts: top_k {self.top_k} is more than the {self.top_groups * self.group_size} experts of "
                f"{self.top_groups} groups",
                "top_k",
            )
        if not self.least_sum > 0 or not self.alpha > 0 or not self.limit > 0:
            raise ConfigError("mixture of experts: least_sum, alpha and limit must be above 0", "moe")
        if not self.gated and self.act != "relu2":
            raise ConfigError(f"mixture of experts: experts without gates have the activation relu2, not {self.act}", "moe")

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.num_groups

    @property
    def first_outputs(self) -> int:
        """Outputs of an expert's first matrix: the gate's and the up's, or the up's alone."""
        return (1 + self.gated) * self.intermediate_size

    @property
    def num_held(self) -> int:
        """Experts whose matrices are here."""
        return self.num_experts if self.held is None else self.held[1] - self.held[0]

    def matrices(self, hidden_size: int) -> list[tuple[int, int]]:
        """(outputs, inputs) of every matrix."""
        width = self.latent_size or hidden_size
        expert = [(self.first_outputs, width), (width, self.intermediate_size)]
        latent = [(width, hidden_size), (hidden_size, width)] if self.latent_size else []
        shared = [] if self.shared is None else self.shared.matrices(hidden_size)
        vision = [] if self.vision is None else self.vision.matrices(hidden_size)
        routers = [(self.num_experts, hidden_size)] + [(1, hidden_size)] * self.shared_gate
        return [*routers, *latent, *expert * self.num_held, *shared, *vision]


MlpSpec = DenseSpec | MoeSpec
"""An MLP, or a mixture of experts."""
