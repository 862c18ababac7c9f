"""The ends of a step: from rows to the model's inputs, from hidden states to the sampler's, and its outcome to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.kernels import gpu
from headrace.kernels.inputs import reference
from headrace.kernels.inputs.reference import LogitsInputs, RowTensors, StepInputs

if TYPE_CHECKING:
    from headrace.kernels.inputs import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

__all__ = ["LogitsInputs", "RowTensors", "StepInputs", "fetch", "logits_inputs", "step_inputs"]

step_inputs = gpu.dispatch(reference.step_inputs, lambda: kernels.step_inputs)
logits_inputs = gpu.dispatch(reference.logits_inputs, lambda: kernels.logits_inputs)
fetch = gpu.dispatch(reference.fetch, lambda: kernels.fetch)
