"""What a plan should take, from a few physical costs: the seed of plan selection where nothing has been measured.

    block = launch + start + spread + cold read of the weights + γ · step
    step  = agreement + hop or planes + passes · multiply + requests + noise

- start: the first step's words, rows and logits come from cold memory.
- cold read: a rank's weights go once from HBM into registers and shared memory.
- agreement: the CTAs of a GPU agree on a token, and all that a single request waits for one thing after the other: a
  CTA's best, the row of W1, waking warps. hop: GPUs agree, too. planes: int8 takes the row of W1 as two.
- multiply: the resident weights are read once for every pass, a group of requests that the tensor cores take together.
  Weights beyond what a GPU's SMs hold are streamed in each pass.
- requests: each request's base logits are read.
- noise: it is drawn for each column of a sampled request; where there is one pass, ahead, during the agreement.
- spread: the launch before the walk in which ranks send each other base logits that lie sharded, all of them for
  `int8`, by request for `int8_split`. `int8_split` has it even where base logits are whole.

The constants are of two H200s: limits of the hardware (DESIGN sections 5 and 6) where the kernel keeps to them, and
where it doesn't what fits the crossover table that comes with the package, each of whose times is met within a fifth.
Other GPUs differ in all of them by similar factors, and only ratios decide.
"""

from __future__ import annotations

import math

from tp_walk.placement import MULTIPLY_WARPS, TILE_ROWS
from tp_walk.plan_table import Layout

LAUNCH_US = 5.1  # an empty graph, as the bench times it
# What a block takes beyond launch, cold read and γ steps, a step being the slope between γ = 7 and 16: 2 µs for one
# greedy request, 6 for 64.
START_US = 4.5
HOP_US = 0.72

# Of the step of one greedy request on two GPUs, 3.3 µs, all but hop, multiply and base logits. Several requests go by
# way of an aggregator, which is one more trip through L2: a step of 8 takes 4.4 µs.
SINGLE_AGREEMENT_US = 1.5
AGREEMENT_US = 2.15
# A step of one request takes int8 on one GPU as long as tp_bf16 on two, hop included.
PLANES_US = 0.75
# Of a sampled step beyond its noise: scores are approximate first, and exact where two are near each other.
SAMPLED_US = 1.5

SMS = 132
# From a read of 38.9 MB: 13.9 µs cold.
COLD_BYTES_PER_US = 38.9e6 / 13.9
# Registers (8 warps of 128 each) and shared memory beside what is staged.
RESIDENT_BYTES = SMS * (128 + 176) * 1024
# tp_bf16 on one GPU streams half of its 78 MB again in each step, at little more than the cold rate: 120.6 µs a block.
STREAM_BYTES_PER_US = 3.4e6
# 0.9 µs for 38.9 MB: 128 bytes a clock of each SM's shared memory.
MULTIPLY_BYTES_PER_US = 38.9e6 / 0.9
# Base logits, a copy through HBM, reads alone.
HBM_BYTES_PER_US = 4.3e6

# Warps draw noise for a pair of tiles in a go, for one without a partner as long: per request and such round.
NOISE_ROUND_US = 0.09
# Of the noise of a single pass, what the agreement hides.
HIDDEN_NOISE_US = 1.55

# int8_split takes 9.9 µs more than int8 for one request with whole base logits, and int8 14.1 for a sharded one, of
# which 3.3 are its bytes: a launch, its headers and arrivals, and a walk that begins only then.
SPREAD_US = 11.0
# Both directions at once; the 68 MB of int8's 64 sharded requests at γ = 7 take 228 µs more than none.
NVLINK_BYTES_PER_US = 0.34e6

# Requests that one pass multiplies: the columns of an MMA; int8 needs two, one for each plane of u.
PASS_REQUESTS = {"tp_bf16": 8, "int8": 4, "int8_split": 4}

BASE_BYTES = 2


def seed_us(
    plan: str,
    *,
    vocab_size: int,
    markov_rank: int,
    world_size: int,
    batch: int,
    gamma: int,
    sampled: bool,
    layout: Layout,
) -> float | None:
    """Expected µs of a block; None for plans that this model doesn't know."""
    if plan not in PASS_REQUESTS:
        return None
    is_sharded = plan == "tp_bf16"
    columns = vocab_size / world_size if is_sharded else vocab_size
    weights = columns * (2 * markov_rank if is_sharded else markov_rank + 4)
    requests = math.ceil(batch / world_size) if plan == "int8_split" else batch
    passes = math.ceil(requests / PASS_REQUESTS[plan])

    step = SINGLE_AGREEMENT_US if requests == 1 else AGREEMENT_US
    if not is_sharded:
        step += PLANES_US
    elif world_size > 1:
        step += HOP_US
    step += passes * _pass_us(weights)
    step += requests * columns * BASE_BYTES / HBM_BYTES_PER_US
    if sampled:
        step += SAMPLED_US + _noise_us(requests, passes, columns)
    read = min(weights, RESIDENT_BYTES) / COLD_BYTES_PER_US
    spread = _spread_us(plan, requests, gamma, vocab_size, world_size, layout)
    return LAUNCH_US + START_US + spread + read + gamma * step


def _pass_us(weights: float) -> float:
    streamed = max(0.0, weights - RESIDENT_BYTES)
    return (weights - streamed) / MULTIPLY_BYTES_PER_US + streamed / STREAM_BYTES_PER_US


def _noise_us(requests: int, passes: int, columns: float) -> float:
    tiles = math.ceil(columns / (TILE_ROWS * SMS))
    drawn = requests * math.ceil(tiles / (2 * MULTIPLY_WARPS)) * NOISE_ROUND_US
    return max(0.0, drawn - HIDDEN_NOISE_US) if passes == 1 else drawn


def _spread_us(plan: str, requests: int, gamma: int, vocab_size: int, world_size: int, layout: Layout) -> float:
    if plan == "tp_bf16" or world_size == 1 or (plan == "int8" and layout == "full"):
        return 0.0
    foreign = 0.0 if layout == "full" else requests * gamma * vocab_size * BASE_BYTES * (world_size - 1) / world_size
    return SPREAD_US + foreign / NVLINK_BYTES_PER_US
