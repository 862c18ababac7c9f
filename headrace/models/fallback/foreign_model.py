"""ForeignModel: the runner's interface to a model that another library built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.model_spec import ForeignSpec
from headrace.models.fallback.contract import ContextCell, check_inputs, finished_logits
from headrace.models.interface import ModelInputs
from headrace.parallel.group import ALONE
from headrace.weights.names import NameTable
from headrace.weights.update import TensorFacts, WeightUpdate


class ForeignModel(nn.Module):
    """A foreign model that runs on headrace's attention.

    Args:
        dtype: of the hidden states.
    """

    group = ALONE
    foreign: Any
    """The library's own model."""

    def __init__(self, spec: ForeignSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.cell = ContextCell()

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, ctx: ForwardContext) -> torch.Tensor:
        """One step: ``[T, hidden]``, as the head takes it.

        Raises:
            ValueError: the model does not take an input, or a layer attended out of turn.
        """
        check_inputs(inputs)
        if not len(inputs.input_ids):
            return torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=inputs.input_ids.device)
        with self.cell.holding(ctx):
            return self._run_layers(inputs)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, columns]`` float32, -inf in columns that pad the vocabulary."""
        if not len(hidden):
            return torch.empty(0, self.spec.vocab_size, dtype=torch.float32, device=hidden.device)
        return finished_logits(self._run_head(hidden), self.spec.num_tokens)

    def name_table(self) -> NameTable:
        """Maps the library's names to its own weights. A tied weight has one name, and its others are ties."""
        table, first = NameTable(), dict[int, str]()
        for name, weight in self.tensors_to_update().items():
            if id(weight) in first:
                table.tie(name, first[id(weight)])
            else:
                first[id(weight)] = name
                table.add(name, name)
        return table

    def update_plan(self, facts: list[TensorFacts]) -> WeightUpdate:
        """Finds places for tensors under the library's names, in its own. Errors as of ``WeightUpdate``."""
        return WeightUpdate(self.name_table(), self.tensors_to_update(), facts)

    def tensors_to_update(self) -> dict[str, torch.Tensor]:
        """Parameters, and saved buffers of floats: a bias that chooses experts may be one."""
        stored = self.foreign.state_dict(keep_vars=True)
        return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}

    def _run_layers(self, inputs: ModelInputs) -> torch.Tensor:
        raise NotImplementedError

    def _run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError
