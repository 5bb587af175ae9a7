"""What a plan should take, from the hardware's limits: the seed of plan selection where nothing has been measured.

    block = launch + spread + cold read of the weights + γ · (rendezvous + hop + passes · multiply + requests)

- launch: an empty graph's time.
- cold read: a rank's weights go once from HBM into registers and shared memory.
- rendezvous: the CTAs of a GPU agree on a token. hop: GPUs agree, too.
- multiply: the resident weights are read once for every pass, a group of requests that the tensor cores take together.
  Weights beyond what a GPU's SMs hold are read from L2 in each pass, or from HBM where L2 can't hold them either.
- requests: each request's base logits are read, and for a sampled one noise is drawn for each of its columns.
- spread: the launch before the walk in which ranks send each other base logits that lie sharded, all of them for
  `int8`, by request for `int8_split`; a hop for the headers, one for the arrivals. `int8_split` has it even where base
  logits are whole, and at the end a hop for the tokens.

The constants were measured on two H200s (DESIGN sections 5 and 6); other GPUs differ in all of them by similar factors,
and only ratios decide.
"""

from __future__ import annotations

import math

from tp_walk.plan_table import Layout

LAUNCH_US = 4.4
RENDEZVOUS_US = 1.22
HOP_US = 0.72

# Both from a read of 38.9 MB: 13.9 µs cold, 6.6 µs from a warm L2.
COLD_BYTES_PER_US = 38.9e6 / 13.9
L2_BYTES_PER_US = 38.9e6 / 6.6
L2_BYTES = 40e6  # of 60 MB, what other traffic leaves
# A copy through HBM, reads alone.
HBM_BYTES_PER_US = 4.3e6

# 132 SMs with 196 KB of registers and 200 KB of shared memory for weights.
RESIDENT_BYTES = 132 * 396e3
# 0.9 µs for 38.9 MB.
MULTIPLY_BYTES_PER_US = 38.9e6 / 0.9

# Philox and two logarithms: about 60 instructions a column, 128 lanes of 132 SMs at 1.8 GHz, half of them in use.
NOISE_COLUMNS_PER_US = 132 * 128 * 1.8e3 / 60 / 2

# What a GPU takes in over NVLink.
NVLINK_BYTES_PER_US = 0.37e6

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

    step = RENDEZVOUS_US + (HOP_US if is_sharded and world_size > 1 else 0.0)
    step += math.ceil(requests / PASS_REQUESTS[plan]) * _pass_us(weights)
    step += requests * columns * BASE_BYTES / HBM_BYTES_PER_US
    if sampled:
        step += requests * columns / NOISE_COLUMNS_PER_US
    read = min(weights, RESIDENT_BYTES) / COLD_BYTES_PER_US
    return LAUNCH_US + _spread_us(plan, requests, gamma, vocab_size, world_size, layout) + read + gamma * step


def _pass_us(weights: float) -> float:
    streamed = max(0.0, weights - RESIDENT_BYTES)
    rate = L2_BYTES_PER_US if streamed <= L2_BYTES else COLD_BYTES_PER_US
    return (weights - streamed) / MULTIPLY_BYTES_PER_US + streamed / rate


def _spread_us(plan: str, requests: int, gamma: int, vocab_size: int, world_size: int, layout: Layout) -> float:
    if plan == "tp_bf16" or world_size == 1 or (plan == "int8" and layout == "full"):
        return 0.0
    tokens = HOP_US if plan == "int8_split" else 0.0
    foreign = 0.0 if layout == "full" else requests * gamma * vocab_size * BASE_BYTES * (world_size - 1) / world_size
    return LAUNCH_US + 2 * HOP_US + foreign / NVLINK_BYTES_PER_US + tokens
