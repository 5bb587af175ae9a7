"""The noise stream: exact words, exact logarithms, the same wherever a shard begins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import philox

from tp_walk.noise import gumbel, philox4x32, random_bits

WORD = st.integers(0, 2**32 - 1)


def words(counter: list[int], key: list[int]) -> list[int]:
    k0, k1 = (torch.tensor(word) for word in key)
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    return [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))]


# The known answers that Random123 ships for philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "right"),
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], right: list[int]) -> None:
    assert words(counter, key) == right


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_agrees_with_python_integers(counter: list[int], key: list[int]) -> None:
    assert words(counter, key) == philox(counter, key)


@given(
    key=st.integers(-(2**63), 2**63 - 1),
    offset=st.integers(0, 2**63 - 1),
    row=st.integers(0, 2**40),
    step=st.integers(0, 63),
)
def test_bits_of_an_id_come_from_its_own_counter(key: int, offset: int, row: int, step: int) -> None:
    (bits,) = random_bits(torch.tensor([key]), torch.tensor([offset]), torch.tensor([row]), step, 0, 11).tolist()
    unsigned = key % 2**64
    right: list[int] = []
    for group in range(3):
        right += philox([group, row % 2**32, step, offset % 2**32], [unsigned % 2**32, unsigned >> 32])
    assert bits == right[:11]


@given(start=st.integers(0, 60), width=st.integers(0, 30))
def test_a_shard_draws_its_part_of_the_whole(start: int, width: int) -> None:
    key, offset, rows = torch.tensor([5, -9]), torch.tensor([1, 2]), torch.tensor([0, 1])
    whole = random_bits(key, offset, rows, 3, 0, 90)
    assert torch.equal(random_bits(key, offset, rows, 3, start, start + width), whole[:, start : start + width])


def test_gumbel_at_the_ends_and_the_middle() -> None:
    assert gumbel(torch.tensor([2**32 - 1])).item() == -math.inf  # its uniform rounds to 1
    highest = gumbel(torch.tensor([0])).item()
    assert highest == pytest.approx(-math.log(2.0**-33), rel=1e-7)
    # Both logarithms are rounded to the nearest float32.
    for bits in (1, 12345, 2**31, 2**32 - 300):
        uniform = float((torch.tensor(float(bits)) + 0.5) * 2.0**-32)
        inner = torch.tensor(-math.log1p(-uniform), dtype=torch.float64).float().item()
        assert gumbel(torch.tensor([bits])).item() == torch.tensor(-math.log(inner), dtype=torch.float64).float().item()


def test_gumbel_is_the_same_in_every_lane() -> None:
    bits = random_bits(torch.tensor([7]), torch.tensor([0]), torch.tensor([0]), 0, 0, 4000)[0]
    whole = gumbel(bits)
    for start in range(1, 9):
        assert torch.equal(gumbel(bits[start:].clone()), whole[start:])


def test_gumbel_has_the_distributions_mean_and_variance() -> None:
    values = gumbel(random_bits(torch.tensor([1]), torch.tensor([2]), torch.tensor([3]), 4, 0, 200_000)).double()
    # Five standard errors around Euler's constant and pi^2 / 6; the bits are fixed.
    assert values.mean().item() == pytest.approx(0.5772156649, abs=5 * math.pi / math.sqrt(6 * 200_000))
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)
