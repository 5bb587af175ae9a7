"""The counter-based noise of sampled walks: Philox4x32-10 in exact integer torch operations, on CPU or GPU.

A draw depends on (key, id, row, step, offset) alone: not on the world size, the plan, the shard or the neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LOW32 = 0xFFFFFFFF

# Philox4x32's multipliers and Weyl increments (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011).
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Noise:
    """Where a walk's draws come from.

    key: 64 bits, as an int or a device tensor `[1]` or `[batch]` int64.
    offset: the fourth counter word, modulo 2^32. An int is literal; a device tensor `[1]` or `[batch]` int64 is read on
    the device, and advanced by one by every walk that is given temperatures.
    rows: `[batch]` int64, the second counter word, modulo 2^32, in place of the batch slot.
    """

    key: int | torch.Tensor
    offset: int | torch.Tensor
    rows: torch.Tensor | None = None


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10: four counter words and two key words → four random words.

    All are int64 tensors holding 32-bit values, of shapes that broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap around in int64: their bits are right, and the mask drops the copies of the sign.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> 32 & _LOW32) ^ c1 ^ k0, product1 & _LOW32
        c2, c3 = (product0 >> 32 & _LOW32) ^ c3 ^ k1, product0 & _LOW32
        k0, k1 = k0 + _WEYL[0] & _LOW32, k1 + _WEYL[1] & _LOW32
    return c0, c1, c2, c3


def random_bits(
    key: torch.Tensor, offset: torch.Tensor, rows: torch.Tensor, step: int, start: int, stop: int
) -> torch.Tensor:
    """`[batch, stop - start]` int64 of 32 random bits, for the ids `[start, stop)` of one step.

    key, offset, rows: `[batch]` int64, on the device where the bits are wanted; key's 64 bits as a signed number.
    """
    first = start // 4
    groups = torch.arange(first, -(-stop // 4), device=key.device)
    key, offset, rows = key[:, None], offset[:, None] & _LOW32, rows[:, None] & _LOW32
    counter = (groups[None, :], rows, torch.full_like(rows, step), offset)
    words = philox4x32(counter, (key & _LOW32, key >> 32 & _LOW32))
    bits = torch.stack([word.expand(len(key), len(groups)) for word in words], dim=-1).flatten(-2)
    return bits[:, start - 4 * first : stop - 4 * first]


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """−log(−log1p(−uniform)) in float32, with uniform = (float32(bits) + 0.5) · 2^-32; int64 bits of any shape.

    Both logarithms go through float64, so that each is the float32 nearest to the true value. Vectorised float32
    logarithms may differ in the last bit from lane to lane, and an id's noise would depend on where its shard begins.
    """
    uniform = (bits.float() + 0.5) * 2.0**-32
    exponential = -torch.log1p(-uniform.double()).float()
    return -torch.log(exponential.double()).float()
