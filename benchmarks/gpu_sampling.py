"""Times sampling on a GPU, in a CUDA graph: microseconds by kind of filter and number of rows.

    python benchmarks/gpu_sampling.py [VOCAB]

``peaked``: logits of a confident model; ``flat``: logits of which top_p keeps most tokens.
"""

from __future__ import annotations

import sys

import torch

from headrace.kernels.sampling.triton_sample import sample

NONE = 10**9
KINDS = {
    "plain": None,
    "filters, none used": (1.0, NONE, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_p 0.9": (1.0, NONE, 0.9, 0.0),
    "min_p 0.05": (1.0, NONE, 1.0, 0.05),
}
REPLAYS = 50


def microseconds(logits: torch.Tensor, kind: tuple[float, int, float, float] | None) -> float:
    rows, vocab = logits.shape
    device = logits.device
    temperature, top_k, top_p, min_p = kind or (1.0, NONE, 1.0, 0.0)
    asked = torch.tensor([[temperature, min(top_k, vocab), top_p, min_p]], dtype=torch.float64, device=device)
    filters = None if kind is None else asked.expand(rows, -1).contiguous()
    temperatures = torch.full((rows,), temperature, device=device)
    keys = torch.arange(3 * rows, device=device).view(rows, 3)
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    sample(logits, temperatures, keys, keys[:, 0].contiguous(), slots, filters)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    positions = keys[:, 0].contiguous()
    with torch.cuda.graph(graph):
        sample(logits, temperatures, keys, positions, slots, filters)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return float(sorted(times)[len(times) // 2])


def main() -> None:
    vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 151_936
    generator = torch.Generator("cuda").manual_seed(0)
    print(f"| logits | rows | {' | '.join(KINDS)} |")
    print(f"| --- | --- |{' ---: |' * len(KINDS)}")
    for name, spread in (("peaked", 4.0), ("flat", 0.5)):
        for rows in (1, 8, 64, 256):
            logits = spread * torch.randn(rows, vocab, device="cuda", generator=generator)
            if name == "peaked":
                logits[:, :5] += 20.0
            found = [microseconds(logits, kind) for kind in KINDS.values()]
            print(f"| {name} | {rows} | {' | '.join(f'{time:.1f}' for time in found)} |", flush=True)


if __name__ == "__main__":
    main()
