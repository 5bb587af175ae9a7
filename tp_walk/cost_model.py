"""What a plan should take, from a few physical costs: the seed of plan selection where nothing has been measured.

    block = launch + start + spread + cold read of the weights + γ · step
    step  = agreement + hop + passes · (multiply + noise, beside stream)

- start: the first step's words, rows and logits come from cold memory, and its noise is drawn while nothing else goes
  on.
- cold read: a rank's weights go once from HBM into registers and shared memory.
- agreement: the CTAs of a GPU agree on a token, and all that a single request waits for one thing after the other: a
  CTA's best, the row of W1, waking warps. hop: GPUs agree, too. Where a step has several passes, both hide behind the
  work of the others.
- multiply: the resident weights are read once for every pass, a group of requests that the tensor cores take together,
  and all of a pass's rows get their base logits and are compared.
- stream: what doesn't fit, by the kernel's own arithmetic (`placement`), is read again in each pass. Through slots
  that goes on beside all else: the longer of the two counts, and a part of the other. Loaded tiles come on top.
- noise: it is drawn for each column of a sampled request; in kernels for few requests ahead, during the agreement.
- spread: the launch before the walk in which ranks send each other base logits that lie sharded, all of them for
  `int8`, by request for `int8_split`. `int8_split` has it even where base logits are whole.

The constants are of one and of two H200s: limits of the hardware (DESIGN sections 5 and 6) where the kernels keep to
them, and where they don't what fits the eight crossover tables that come with the package. Each time of theirs is met
within a fifth. Other GPUs differ in all of them by similar factors, and only ratios decide.
"""

from __future__ import annotations

import math

from tp_walk.errors import PlanUnavailableError
from tp_walk.kernels import MAX_VOCAB_SIZE, TP_WORLD_SIZES
from tp_walk.mailbox import MAX_WORLD_SIZE
from tp_walk.placement import STREAM_SLOT_BYTES, Placement, column_uses, place, requests_of
from tp_walk.plan_table import Layout

SMS = 132
SHARED_BYTES = 232_448  # a CTA's, at most

LAUNCH_US = 5.1  # an empty graph, as the bench times it
# What a block takes beyond launch, cold read and γ steps, a step being the slope between γ = 7 and 16: 0 to 3 µs for
# one greedy request. Sampled it takes more, the first step's noise aside.
START_US = 2.5
SAMPLED_START_US = 1.2
HOP_US = 0.72

# Of the step of one greedy request on two GPUs, 3.2 µs, all but hop and multiply. Several requests go by way of an
# aggregator, which is one more trip through L2: a step of 2 to 8 takes 3.9 µs.
SINGLE_AGREEMENT_US = 1.55
AGREEMENT_US = 2.25
# Of the other passes of a step, what the agreement can hide behind: it has the service warps, which they want, too.
HIDING = 0.5
# Of a sampled step beyond its noise: scores are approximate first, and exact where two are near each other.
SAMPLED_US = 0.3

# The slope of a block's time beyond its steps over what a GPU holds, from 33 to 43 MB.
COLD_BYTES_PER_US = 3.7e6
# By groups of MMA columns in a pass. One: 128 bytes a clock of each SM's shared memory. Two are bound by what goes
# on beside the dot products, with the base logits and the best rows of twice as many requests.
MULTIPLY_BYTES_PER_US = {1: 41e6, 2: 15.6e6}
# Streaming through slots, and nothing else: what they hold is there when a pass begins. At V = 248,320 a step for one
# request takes 6.8 µs on two GPUs, and 23 on one, whose 94 MB L2 can't hold and HBM brings again.
L2_BYTES = 47e6
L2_BYTES_PER_US = 4.8e6
STREAM_BYTES_PER_US = 4.1e6
# Of the shorter of stream and work, what doesn't hide behind the longer.
UNHIDDEN = 0.1
# And of noise that is drawn ahead, by the warps that empty the slots: a lane of tp_bf16 draws for rows of its own, four
# lanes of int8 share theirs.
UNHIDDEN_NOISE = {False: 0.8, True: 0.2}  # by whether weights are int8
# Loaded tiles, a few: a step waits for the first ones, but not where another pass goes on.
LOAD_START_US = 0.8
# Base logits, a copy through HBM, reads alone; and loaded tiles.
HBM_BYTES_PER_US = 4.3e6
# Draws of a GPU: a step of int8's 64 requests takes 26 to 40 µs more sampled than greedy, for V = 129,280 to 163,840.
NOISE_COLUMNS_PER_US = 0.31e6
# With two groups of columns, a tile that comes through slots is drawn for by itself: where a lane has two requests, in
# tp_bf16, twice as many draws as for one of a pair.
STREAMED_NOISE = {False: 1.0, True: 0.5}
# Of the noise that is drawn ahead, what the agreement hides.
HIDDEN_NOISE_US = 0.6

# int8_split takes 10 µs more than int8 for one request with whole base logits, and int8 15 for a sharded one, of which
# 3.4 are its bytes: a launch, its headers and arrivals, and a walk that begins only then.
SPREAD_US = 11.0
# Both directions at once; the 68 MB of int8's 64 sharded requests at γ = 7 take 228 µs more than none.
NVLINK_BYTES_PER_US = 0.31e6

KNOWN_PLANS = ("tp_bf16", "int8", "int8_split")

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
    """Expected µs of a block; None for plans that this model doesn't know, and where none of their kernels run."""
    if plan not in KNOWN_PLANS or vocab_size > MAX_VOCAB_SIZE:
        return None
    if world_size not in {"tp_bf16": TP_WORLD_SIZES, "int8_split": range(2, MAX_WORLD_SIZE + 1)}.get(
        plan, (world_size,)
    ):
        return None
    is_sharded = plan == "tp_bf16"
    columns = math.ceil(vocab_size / world_size) if is_sharded else vocab_size
    requests = math.ceil(batch / world_size) if plan == "int8_split" else batch
    placement = kernel_placement(not is_sharded, markov_rank, columns, requests, sampled)
    if placement is None:
        return None
    groups = placement.columns.groups
    at_once = min(requests, requests_of(placement.int8, placement.columns))
    passes = math.ceil(requests / at_once)
    tile_bytes = placement.fragment_bytes / placement.tiles_per_cta
    streamed = placement.streamed_tiles * tile_bytes
    resident = placement.fragment_bytes - streamed

    agreement = SINGLE_AGREEMENT_US if requests == 1 else AGREEMENT_US
    if is_sharded and world_size > 1:
        agreement += HOP_US
    by_slots = streamed if placement.stream_slots else 0.0
    loaded = streamed - by_slots
    work = (resident + by_slots) / MULTIPLY_BYTES_PER_US[groups] + loaded / HBM_BYTES_PER_US
    drawn = at_once * columns / NOISE_COLUMNS_PER_US if sampled else 0.0
    if sampled:
        agreement += SAMPLED_US
        if groups > 1:
            work += drawn * (1.0 + STREAMED_NOISE[placement.int8] * by_slots / placement.fragment_bytes)
        elif by_slots:
            agreement += UNHIDDEN_NOISE[placement.int8] * drawn
        else:
            work += max(0.0, drawn - HIDDEN_NOISE_US)
    stream = _stream_us(placement, by_slots)
    each = max(stream, work) + UNHIDDEN * min(stream, work)
    if passes > 1:
        agreement = max(0.0, agreement - HIDING * (passes - 1) * each)
    elif loaded:
        agreement += LOAD_START_US

    start = START_US + requests * columns * BASE_BYTES / HBM_BYTES_PER_US
    if sampled:
        start += SAMPLED_START_US + drawn
    spread = _spread_us(plan, requests, gamma, vocab_size, world_size, layout)
    return LAUNCH_US + start + spread + resident / COLD_BYTES_PER_US + gamma * (agreement + passes * each)


def kernel_placement(int8: bool, markov_rank: int, rows: int, requests: int, sampled: bool) -> Placement | None:
    """Of the kernel that takes so many requests; None where there is none."""
    for columns in reversed(column_uses(int8, requests, sampled)):
        try:
            return place(
                int8=int8,
                markov_rank=markov_rank,
                rows=rows,
                max_batch=max(requests, 1),
                num_sms=SMS,
                shared_limit=SHARED_BYTES,
                sampled=sampled,
                base_bytes=BASE_BYTES,
                rounding="engine",
                columns=columns,
            )
        except PlanUnavailableError:  # no room to stage so many at once: more passes
            continue
    return None


def _stream_us(placement: Placement, by_slots: float) -> float:
    ahead = placement.grid * placement.stream_slots * STREAM_SLOT_BYTES
    return max(0.0, by_slots - ahead) / (L2_BYTES_PER_US if by_slots <= L2_BYTES else STREAM_BYTES_PER_US)


def _spread_us(plan: str, requests: int, gamma: int, vocab_size: int, world_size: int, layout: Layout) -> float:
    if plan == "tp_bf16" or world_size == 1 or (plan == "int8" and layout == "full"):
        return 0.0
    foreign = 0.0 if layout == "full" else requests * gamma * vocab_size * BASE_BYTES * (world_size - 1) / world_size
    return SPREAD_US + foreign / NVLINK_BYTES_PER_US
