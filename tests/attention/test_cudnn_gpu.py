"""cuDNN itself against the oracle, on a Hopper GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support.attention_cases import layer_spec, make_case

from attention.test_triton import to
from headrace.attention import cudnn
from headrace.attention.compiled import compiling
from headrace.attention.reference import ReferenceAttention
from headrace.kernels import support

CUDA = torch.device("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.compute_capability(CUDA) != support.HOPPER_SM, reason="there is no Hopper GPU"),
    pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="cuDNN's frontend is not installed"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "rows", [[(900, 900)], [(1500, 1600), (900, 900), (1000, 3000)], [(1024, 20_000)], [(800, 801), (4096, 4096)]], ids=str
)
def test_long_prompts(rows: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole ones and chunks, alone and together, also in fewer rows than the kernel is for."""
    asked = []

    def waited(kernel: cudnn.CudnnKernel) -> object:
        asked.append(kernel)
        compiling(kernel).join(None)
        return compiling(kernel)

    monkeypatch.setattr(cudnn, "compiling", waited)
    spec = layer_spec(num_heads=16, num_kv_heads=4, head_dim=256, v_head_dim=256, scale=0.0625)
    case = make_case(spec, rows, dtype=torch.bfloat16, block_size=16)
    # What is not a key is finite, as in the engine's cache: masked positions still meet products.
    case.cache.rows.nan_to_num_()
    there, oracle, backend = to(case, CUDA), ReferenceAttention(), cudnn.CudnnPrefill()
    oracle.plan(case.step)
    backend.plan(there.step)
    got = backend.run(there.inputs).float().cpu()
    assert asked and all(compiling(kernel).ready for kernel in asked)
    torch.testing.assert_close(got, oracle.run(case.inputs).float(), atol=2e-2, rtol=2e-2)
