"""Token masks against their reference, and against what a bit means."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.sampling import reference
from headrace.kernels.sampling import triton_mask as mask


@pytest.mark.parametrize("vocab", [31, 64, 4096, 5003])
def test_masks(vocab: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32)), generator=generator).int()
    which = torch.tensor([2, -1, 0, 0, 1], dtype=torch.int32)
    found, expected = logits.to(device, copy=True), logits.clone()
    mask.apply_masks(found, masks.to(device), which.to(device))
    reference.apply_masks(expected, masks, which)
    assert torch.equal(found.cpu(), expected)
    for row, own in enumerate(which.tolist()):
        for token in (0, 1, 30, vocab // 2, vocab - 1):
            allowed = own < 0 or int(masks[own, token // 32]) >> token % 32 & 1
            assert expected[row, token] == (logits[row, token] if allowed else -torch.inf)
