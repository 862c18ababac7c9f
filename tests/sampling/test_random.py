"""Random numbers: the published vectors, and independence of everything but the key."""

from __future__ import annotations

import pytest
import torch

from headrace.sampling.random import philox, seed_words, uniform

VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and result of the known-answer tests that the paper's authors published with Random123."""


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, result: str) -> None:
    found = philox(torch.tensor(words(counter)).unsqueeze(1), torch.tensor(words(key)).unsqueeze(1))
    assert found.flatten().tolist() == words(result)


def test_philox_of_many_is_philox_of_each() -> None:
    counters = torch.tensor([words(counter) for counter, _, _ in VECTORS]).t()
    keys = torch.tensor([words(key) for _, key, _ in VECTORS]).t()
    assert philox(counters, keys).t().tolist() == [words(result) for _, _, result in VECTORS]


def keys(*entries: tuple[int, int]) -> torch.Tensor:
    return torch.tensor([(*seed_words(seed), sample) for seed, sample in entries])


def test_a_number_depends_on_seed_sample_and_position_alone() -> None:
    entries = [(7, 0), (7, 1), (8, 0), (-1, 0), (2**63 - 1, 0), (2**32 + 7, 0)]
    positions = torch.tensor([5, 5, 5, 5, 5, 5])
    together = uniform(keys(*entries), positions)
    assert together.unique().numel() == len(entries)
    for index, entry in enumerate(entries):
        assert uniform(keys(entry), positions[:1]).item() == together[index].item()
    assert uniform(keys((7, 0)), torch.tensor([6])).item() != together[0].item()


def test_numbers_are_uniform_and_independent() -> None:
    count = 100_000
    numbers = uniform(keys((3, 0)).expand(count, 3), torch.arange(count))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    observed = torch.histc(numbers.float(), 100, 0.0, 1.0)
    expected = count / 100
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 149  # 99 degrees of freedom, p = 0.001
    centred = numbers - 0.5
    assert abs(float((centred[1:] * centred[:-1]).mean() * 12)) < 0.012
    neighbour = uniform(keys((4, 0)).expand(count, 3), torch.arange(count)) - 0.5
    assert abs(float((centred * neighbour).mean() * 12)) < 0.012
