"""Compares the results of two implementations on the same sequences, and judges the difference."""

from __future__ import annotations

import dataclasses

import torch

from headrace.parity.report import Line

_EXACT = 1e-3
"""Largest difference of a logprob in float32."""
_ROOM = 1.5
"""Largest error of the engine in a dtype, as a multiple of the error of the library's own forward in it."""
_LAYER = {"float32": 1e-3}
_LAYER_ELSE = 0.1
"""Relative difference of a layer's result from which it counts as diverging."""
_AGREEMENT = 1.0
_AGREEMENT_ELSE = 0.9


@dataclasses.dataclass
class Seen:
    """A model's results for the sequences."""

    logprobs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """``[tokens, vocab]`` float32 a sequence."""
    layers: list[list[list[torch.Tensor]]] = dataclasses.field(default_factory=list)
    """``[tokens, width]`` float32 of each call of a layer, by layer, by sequence."""
    ends: list[str] = dataclasses.field(default_factory=list)
    """Reasons why sequences ended before their last token."""


def compared(name: str, dtype: str, seen: Seen, reference: Seen) -> Line:
    """Compares the results with the reference, without a verdict."""
    worst = total = 0.0
    tokens = agreed = numbers = broken = 0
    for own, theirs in zip(seen.logprobs, reference.logprobs, strict=True):
        theirs = theirs[: len(own)]
        tokens += len(theirs)
        width = min(own.shape[-1], theirs.shape[-1])
        own, theirs = own[:, :width], theirs[:, :width]
        # Tokens that the reference itself rules out have no number to compare.
        wanted, finite = theirs.isfinite(), own.isfinite()
        broken += int((own.isnan() | (wanted & ~finite)).any(-1).sum())
        error = (own - theirs)[wanted & finite].abs()
        if error.numel():
            worst = max(worst, float(error.max()))
        total += float(error.sum())
        numbers += error.numel()
        agreed += int((own.argmax(-1) == theirs.argmax(-1)).sum())
    diverging = _first_diverging(seen.layers, reference.layers, _LAYER.get(dtype, _LAYER_ELSE))
    return Line(name, dtype, worst, total / max(1, numbers), agreed / max(1, tokens), diverging, broken=broken)


def _first_diverging(seen: list[list[list[torch.Tensor]]], reference: list[list[list[torch.Tensor]]], limit: float) -> str:
    """Call by call: a layer that is called again goes on from its own results."""
    places = [(call, layer) for layer, calls in enumerate(reference[0]) for call in range(len(calls))]
    for call, layer in sorted(places):
        pairs = [
            (mine[layer][call], theirs[layer][call])
            for mine, theirs in zip(seen, reference, strict=True)
            if layer < len(mine) and call < min(len(mine[layer]), len(theirs[layer]))
        ]
        if not pairs or any(own.shape[1:] != its.shape[1:] for own, its in pairs):
            continue
        own = torch.cat([mine for mine, _ in pairs])
        theirs = torch.cat([its[: len(mine)] for mine, its in pairs])
        error = float((own - theirs).norm() / theirs.norm().clamp_min(1e-12))
        if not error <= limit:
            again = f" (call {call + 1})" if len(reference[0][layer]) > 1 else ""
            return f"layer {layer}{again}, by {error:.1e} of its size"
    return ""


def judged(line: Line, own: Line | None, ends: list[str]) -> Line:
    """``own``: the library's forward in the same dtype, where that is not float32; ``ends``: why sequences ended early."""
    exact = own is None
    agreement = _AGREEMENT if own is None else min(_AGREEMENT_ELSE, own.agreement)
    room = _EXACT if own is None else _ROOM * own.mean_error
    error = line.max_error if exact else line.mean_error
    faults = ends[-1:]
    if line.broken:
        faults.append(f"{line.broken} positions with logprobs that are not finite")
        if own is not None and own.broken:
            faults[-1] += f" ({own.name}: {own.broken})"
    if not error <= room:
        faults.append(f"{'largest' if exact else 'mean'} difference {error:.1e}, at most {room:.1e} is rounding")
    if line.agreement < agreement:
        faults.append(f"agreement {line.agreement:.1%}, expected {agreement:.1%}")
    return dataclasses.replace(line, passed=not faults, note="; ".join(faults))
