"""Products in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_captured(rows: int, inputs: int, product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Captures a product twice, and replays both with other rows when all free memory holds something else: memory that a
    library took for itself in a capture, or shares between calls, shows in the results."""
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    product(x)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(product(x))
    x.copy_(torch.randn_like(x))
    expected = product(x)
    assert expected.is_contiguous()
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(64)]
    for graph, got in zip(graphs, results, strict=True):
        graph.replay()
        assert torch.equal(got, expected)
    del rubbish
