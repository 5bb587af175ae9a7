"""Mailboxes: the memory through which CTAs and ranks agree on each step's token.

`MailboxLayout` is arithmetic alone and the only source of the numbers in csrc/mailbox.cuh, which gets them as macros.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tp_walk.config import MAX_GAMMA
from tp_walk.errors import WalkInputError

WORD_BYTES = 16  # {key: u64, tag: u64}, always written and read by one 128-bit access
LINE_BYTES = 128  # words with different writers or pollers start on different cache lines

# tag = block << BLOCK_SHIFT | chain << PHASE_BITS | phase. No phase is 0, so tag 0, which zeroed memory holds, is never
# valid: not even in the block whose number has wrapped around to 0. The chain is a hash of the row's previous token:
# ranks that ever picked different tokens find out at the next step, instead of going on with different drafts.
PHASE_BITS = 8
CHAIN_BITS = 16
BLOCK_SHIFT = PHASE_BITS + CHAIN_BITS
HEADER_PHASE = (1 << PHASE_BITS) - 1
LOGITS_PHASE = HEADER_PHASE - 1
CHAIN_MULTIPLIER = 0x9E3779B1  # Knuth's multiplicative hash: 2^32 over the golden ratio

MAX_WORLD_SIZE = 8
MAX_CTAS = 256  # slots a row; above the SM count of every GPU up to Blackwell
MAX_BATCH = (1 << 16) - 1  # batch and num_valid travel in 16 bits of a header
HEADER_WORDS = 3

# In kernels for one request, on one or two GPUs, each CTA posts its key to all ranks, in copies, and every CTA polls
# one copy of all posts. More of either would be too many words. CTAs that all polled one copy would hold up its late
# writers.
POST_COPIES = 8
POST_WORLD_SIZE = 2

# Few row capacities mean few cubins: the strides are compiled in, and every max_batch up to 64 shares one kernel.
MIN_ROW_CAPACITY = 64

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1


def chain(previous: int) -> int:
    """The hash of a row's previous token (its anchor at step 0) that the tags of its step carry."""
    return (previous * CHAIN_MULTIPLIER & _U32) >> (32 - CHAIN_BITS)


def step_tag(block: int, step: int, previous: int) -> int:
    """The tag of a row's words at step `step` (0-based) of block `block`, reached through token `previous`."""
    return (block << BLOCK_SHIFT | chain(previous) << PHASE_BITS | (step + 1)) & _U64


def header_tag(block: int) -> int:
    """The tag of the headers of block `block`."""
    return (block << BLOCK_SHIFT | HEADER_PHASE) & _U64


def logits_tag(block: int) -> int:
    """The tag by which a CTA says that its columns of block `block` are in every rank's memory."""
    return (block << BLOCK_SHIFT | LOGITS_PHASE) & _U64


def lse_tag(block: int, step: int) -> int:
    """The tag of the log-sum-exps of step `step`: no token leads to what is only reported."""
    return (block << BLOCK_SHIFT | (step + 1)) & _U64


def describe_tag(tag: int) -> str:
    """A tag in words, for messages."""
    phase = tag & HEADER_PHASE
    named = {HEADER_PHASE: "headers", LOGITS_PHASE: "logits", 0: "nothing written"}
    what = named.get(phase, f"step {phase - 1}")
    return f"{tag:#x} (block {tag >> BLOCK_SHIFT}, {what})"


def make_key(score: float, token: int) -> int:
    """The key of a candidate: larger means better. NaN beats all, +0 equals -0, ties go to the smallest id.

    score: rounded to fp32; its bits, made monotone, are the upper half. token: 0 to 2^32 - 1, complemented below it.
    """
    if score != score:
        return _U32 << 32 | (_U32 - token)
    bits = int.from_bytes(struct.pack("<f", score + 0.0), "little")
    ordered = bits ^ (_U32 if bits >> 31 else 1 << 31)
    return ordered << 32 | (_U32 - token)


def key_token(key: int) -> int:
    """The token of a key."""
    return _U32 - (key & _U32)


@dataclass(frozen=True)
class BitField:
    """`bits` bits of a key from bit `shift` of word `word` on."""

    word: int
    shift: int
    bits: int

    def pack(self, value: int) -> int:
        if not 0 <= value < 1 << self.bits:
            raise WalkInputError(f"{value} doesn't fit the {self.bits} bits of a mailbox field")
        return value << self.shift

    def unpack(self, key: int) -> int:
        return key >> self.shift & ((1 << self.bits) - 1)


# What ranks compare before the first step. A mismatch is reported as the position of the lowest differing bit,
# word * 64 + bit, which names the field: the kernel needs no table. Tensors travel as hashes; `last_tokens` is that of
# the last tokens of the block before, which no later tag has checked.
HEADER_FIELDS: dict[str, BitField] = {
    "batch": BitField(0, 0, 16),
    "num_valid": BitField(0, 16, 16),
    "gamma": BitField(0, 32, 8),
    "plan": BitField(0, 40, 6),
    "base_logits": BitField(0, 46, 2),  # layout and dtype, where ranks send each other base logits
    "rounding": BitField(0, 48, 2),
    "logits": BitField(0, 50, 2),
    "logits_rows": BitField(0, 52, 2),
    "sampled": BitField(0, 54, 2),
    "lse": BitField(0, 56, 2),
    "logits_buffer": BitField(0, 58, 6),
    "anchors": BitField(1, 0, 32),
    "temperatures": BitField(1, 32, 32),
    "key": BitField(2, 0, 16),
    "offset": BitField(2, 16, 16),
    "rows": BitField(2, 32, 16),
    "last_tokens": BitField(2, 48, 16),
}


def pack_header(fields: dict[str, int]) -> tuple[int, ...]:
    """The HEADER_WORDS keys that carry these fields; those left out are 0."""
    keys = [0] * HEADER_WORDS
    for name, value in fields.items():
        keys[HEADER_FIELDS[name].word] |= HEADER_FIELDS[name].pack(value)
    return tuple(keys)


def header_field(position: int) -> str:
    """The name of the header field that holds bit `position` = word * 64 + bit."""
    for name, place in HEADER_FIELDS.items():
        if place.word == position // 64 and place.shift <= position % 64 < place.shift + place.bits:
            return name
    raise WalkInputError(f"no header field holds bit {position}")


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


@dataclass(frozen=True)
class MailboxLayout:
    """Where everything lies in one rank's mailbox memory. Offsets and strides are in bytes.

        block        u64  the number of the block to come             | this rank
        first_block  u64  that of the first block since set-up, reset | alone
        last_tokens  u64  hash of the last tokens of the last block   | touches
        claim        u32  nonzero once a thread owns the status block | these
        in_flight    u32  nonzero while a walk is under way           |
        poison       [source rank]                              words written by peers, sticky until reset
        headers      [block & 1][source rank][HEADER_WORDS]     words written by peers
        results      [block & 1][step & 1][row][source rank]    words written by peers
        arrivals     [source rank][CTA]                         words written by peers
        tokens       [row of the batch][step]                   words written by peers
        slots        [row][CTA]                                 words of this rank alone
        posts        [block & 1][step & 1][copy][source][CTA]   words written by CTAs of the ranks that agree, of row 0
                     when it is alone and they are at most POST_WORLD_SIZE
        partials     [step & 1][row][CTA]                       words of this rank alone: a CTA's part of a log-sum-exp
        columns      [source rank][CTA]                         words written by peers: a CTA's logits are all here
        sums         [step][row][source rank]                   words written by peers: a rank's part of one

    max_batch: the most rows of a launch. world_size: 1 to MAX_WORLD_SIZE. num_ctas: the grid, 1 to MAX_CTAS; row r is
    aggregated by CTA r % num_ctas. Only world_size and the row capacity (max_batch rounded up to a power of two, 64
    or more) enter the arithmetic, so that grids and batch sizes share cubins. Raises WalkInputError outside of that.
    """

    world_size: int
    max_batch: int
    num_ctas: int

    row_capacity: int = field(init=False)
    block_offset: int = field(init=False, default=0)
    first_block_offset: int = field(init=False, default=8)
    last_tokens_offset: int = field(init=False, default=16)
    claim_offset: int = field(init=False, default=24)
    in_flight_offset: int = field(init=False, default=28)
    poison_offset: int = field(init=False, default=LINE_BYTES)
    headers_offset: int = field(init=False)
    headers_block_stride: int = field(init=False)
    headers_source_stride: int = field(init=False, default=HEADER_WORDS * WORD_BYTES)
    results_offset: int = field(init=False)
    results_block_stride: int = field(init=False)
    results_step_stride: int = field(init=False)
    results_row_stride: int = field(init=False)
    arrivals_offset: int = field(init=False)
    arrivals_source_stride: int = field(init=False, default=MAX_CTAS * LINE_BYTES)
    arrivals_cta_stride: int = field(init=False, default=LINE_BYTES)
    tokens_offset: int = field(init=False)
    tokens_row_stride: int = field(init=False, default=MAX_GAMMA * WORD_BYTES)
    slots_offset: int = field(init=False)
    slots_row_stride: int = field(init=False, default=MAX_CTAS * WORD_BYTES)
    posts_offset: int = field(init=False)
    posts_block_stride: int = field(init=False)
    posts_step_stride: int = field(init=False)
    posts_copy_stride: int = field(init=False)
    partials_offset: int = field(init=False)
    partials_step_stride: int = field(init=False)
    partials_row_stride: int = field(init=False, default=MAX_CTAS * WORD_BYTES)
    columns_offset: int = field(init=False)
    columns_source_stride: int = field(init=False, default=MAX_CTAS * WORD_BYTES)
    sums_offset: int = field(init=False)
    sums_step_stride: int = field(init=False)
    sums_row_stride: int = field(init=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        limits = {"world_size": MAX_WORLD_SIZE, "max_batch": MAX_BATCH, "num_ctas": MAX_CTAS}
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise WalkInputError(f"{name} is {value}; a mailbox holds 1 to {limit}")

        def derive(name: str, value: int) -> int:
            object.__setattr__(self, name, value)  # frozen for everyone else
            return value

        rows = derive("row_capacity", max(MIN_ROW_CAPACITY, 1 << (self.max_batch - 1).bit_length()))
        headers = derive("headers_offset", self.poison_offset + _lines(self.world_size * WORD_BYTES))
        headers_block = derive("headers_block_stride", _lines(self.world_size * self.headers_source_stride))
        results = derive("results_offset", headers + 2 * headers_block)
        # A line a row: eight rows on two lines, polled by every CTA, cost 5.2 µs a step instead of 1.8
        # (experiments/results/rendezvous.json).
        results_row = derive("results_row_stride", LINE_BYTES)
        results_step = derive("results_step_stride", rows * results_row)
        results_block = derive("results_block_stride", 2 * results_step)
        arrivals = derive("arrivals_offset", results + 2 * results_block)
        tokens = derive("tokens_offset", arrivals + self.world_size * self.arrivals_source_stride)
        slots = derive("slots_offset", tokens + rows * self.tokens_row_stride)
        posts = derive("posts_offset", slots + rows * self.slots_row_stride)
        posts_copy = derive("posts_copy_stride", min(self.world_size, POST_WORLD_SIZE) * MAX_CTAS * WORD_BYTES)
        posts_step = derive("posts_step_stride", POST_COPIES * posts_copy)
        posts_block = derive("posts_block_stride", 2 * posts_step)
        partials = derive("partials_offset", posts + 2 * posts_block)
        partials_step = derive("partials_step_stride", rows * self.partials_row_stride)
        columns = derive("columns_offset", partials + 2 * partials_step)
        sums = derive("sums_offset", columns + self.world_size * self.columns_source_stride)
        # Close together: one CTA looks at them, once, at the end.
        sums_row = derive("sums_row_stride", self.world_size * WORD_BYTES)
        sums_step = derive("sums_step_stride", _lines(rows * sums_row))
        derive("num_bytes", sums + MAX_GAMMA * sums_step)

    def aggregator(self, row: int) -> int:
        """The CTA that reduces `row` and publishes this rank's result of it."""
        return row % self.num_ctas

    def poison_word(self, source: int) -> int:
        return self.poison_offset + source * WORD_BYTES

    def header_word(self, block: int, source: int, word: int) -> int:
        block_offset = (block & 1) * self.headers_block_stride
        return self.headers_offset + block_offset + source * self.headers_source_stride + word * WORD_BYTES

    def result_word(self, block: int, step: int, row: int, source: int) -> int:
        parities = (block & 1) * self.results_block_stride + (step & 1) * self.results_step_stride
        return self.results_offset + parities + row * self.results_row_stride + source * WORD_BYTES

    def arrival_word(self, source: int, cta: int) -> int:
        return self.arrivals_offset + source * self.arrivals_source_stride + cta * self.arrivals_cta_stride

    def token_word(self, row: int, step: int) -> int:
        return self.tokens_offset + row * self.tokens_row_stride + step * WORD_BYTES

    def slot_word(self, row: int, cta: int) -> int:
        return self.slots_offset + row * self.slots_row_stride + cta * WORD_BYTES

    def post_word(self, block: int, step: int, copy: int, source: int, cta: int) -> int:
        """The ranks' posts lie side by side, as many as there are CTAs, so that lanes of a warp find work. source: the
        rank's place among those that agree.
        """
        parities = (block & 1) * self.posts_block_stride + (step & 1) * self.posts_step_stride
        place = copy * self.posts_copy_stride + (source * self.num_ctas + cta) * WORD_BYTES
        return self.posts_offset + parities + place

    def partial_word(self, step: int, row: int, cta: int) -> int:
        step_offset = (step & 1) * self.partials_step_stride
        return self.partials_offset + step_offset + row * self.partials_row_stride + cta * WORD_BYTES

    def sum_word(self, step: int, row: int, source: int) -> int:
        return self.sums_offset + step * self.sums_step_stride + row * self.sums_row_stride + source * WORD_BYTES

    def columns_word(self, source: int, cta: int) -> int:
        return self.columns_offset + source * self.columns_source_stride + cta * WORD_BYTES

    def defines(self) -> dict[str, int]:
        """The macros that csrc/mailbox.cuh is compiled with: no function of num_ctas, nor of max_batch up to 64."""
        macros = {
            "WORLD_SIZE": self.world_size,
            "WORD_BYTES": WORD_BYTES,
            "PHASE_BITS": PHASE_BITS,
            "CHAIN_BITS": CHAIN_BITS,
            "CHAIN_MULTIPLIER": CHAIN_MULTIPLIER,
            "HEADER_PHASE": HEADER_PHASE,
            "LOGITS_PHASE": LOGITS_PHASE,
            "HEADER_WORDS": HEADER_WORDS,
            "MAX_CTAS": MAX_CTAS,
            "POST_COPIES": POST_COPIES,
            "POST_WORLD_SIZE": POST_WORLD_SIZE,
            "MAX_GAMMA": MAX_GAMMA,
        }
        derived = [name for name in self.__dataclass_fields__ if name.endswith(("_offset", "_stride", "_capacity"))]
        macros |= {name.upper(): getattr(self, name) for name in derived}
        for name, place in HEADER_FIELDS.items():
            macros[f"HEADER_{name.upper()}_WORD"] = place.word
            macros[f"HEADER_{name.upper()}_SHIFT"] = place.shift
            macros[f"HEADER_{name.upper()}_BITS"] = place.bits
        return {f"TPW_{name}": value for name, value in macros.items()}
