"""The ends of a step: from rows to the model's inputs, from hidden states to the sampler's, and its outcome to the host."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.inputs import reference
from headrace.kernels.inputs.reference import LogitsInputs, RowTensors, StepInputs

__all__ = ["LogitsInputs", "RowTensors", "StepInputs", "fetch", "logits_inputs", "step_inputs"]

step_inputs = gpu.dispatch(reference.step_inputs)
logits_inputs = gpu.dispatch(reference.logits_inputs)
fetch = gpu.dispatch(reference.fetch)
