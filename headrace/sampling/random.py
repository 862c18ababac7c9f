"""Counter-based random numbers: a function of (seed, sample, position), on every device and in every batch.

Philox-4x32-10 of J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox-4x32-10.

    Args:
        counter: ``[4, N]`` int64 holding 32-bit words.
        key: ``[2, N]`` int64 holding 32-bit words.

    Returns:
        ``[4, N]`` int64 holding 32-bit words.
    """
    device = counter.device
    multipliers, weyl = _column(_MULTIPLIERS, device), _column(_WEYL, device)
    rounds = torch.arange(ROUNDS, device=device).view(-1, 1, 1)
    keys = (key + rounds * weyl) & _LOW
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        # The product wraps modulo 2**64, which keeps its bits; the shift drags the sign in, which the mask takes off.
        product = even * multipliers
        high = (product >> 32) & _LOW
        even = high.flip(0) ^ odd ^ round_key
        odd = (product & _LOW).flip(0)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def _column(words: tuple[int, int], device: torch.device) -> torch.Tensor:
    """``[2, 1]`` int64, written by the device: a copy from the host would wait for the device."""
    return torch.cat([torch.full((1, 1), word, dtype=torch.int64, device=device) for word in words])


def uniform(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns a number in [0, 1) with 53 random bits for each row.

    Args:
        keys: ``[N, 3]`` int64: low and high word of the seed, and the sample's index.
        positions: ``[N]`` int64: position in its sequence of the token to sample.

    Returns:
        ``[N]`` float64.
    """
    zeros = torch.zeros_like(positions)
    words = philox(torch.stack((positions, keys[:, 2], zeros, zeros)), keys[:, :2].t())
    bits = (words[0] >> 5 << 26) | (words[1] >> 6)
    return bits.double() * 2.0**-53


def seed_words(seed: int) -> tuple[int, int]:
    """Low and high 32 bits of a seed of 64 bits, in two's complement."""
    return seed & _LOW, (seed >> 32) & _LOW
