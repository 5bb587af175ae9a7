"""MailboxLayout, tags, keys and the status block: by themselves, and against their twins in csrc."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_walk import jit
from tp_walk.config import MAX_GAMMA
from tp_walk.errors import KernelError, WalkInputError, WalkMismatch, WalkOverlap, WalkTimeout
from tp_walk.mailbox import (
    BLOCK_SHIFT,
    HEADER_FIELDS,
    HEADER_PHASE,
    HEADER_WORDS,
    LINE_BYTES,
    LOGITS_PHASE,
    MAX_CTAS,
    POST_COPIES,
    POST_WORLD_SIZE,
    WORD_BYTES,
    MailboxLayout,
    chain,
    header_field,
    header_tag,
    key_token,
    logits_tag,
    lse_tag,
    make_key,
    pack_header,
    step_tag,
)
from tp_walk.status import STATUS_BYTES, STATUS_FIELDS, Wait, WalkCode, WalkStatus, status_defines

BLOCKS = (0, 1, 2, 3, 17, (1 << 40) - 1, 1 << 40, (1 << 64) - 1)
LAYOUTS = [MailboxLayout(world, batch, 132) for world, batch in ((1, 1), (2, 64), (3, 65), (4, 200), (8, 64))]

# ---- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_words_lie_apart_and_inside(layout: MailboxLayout) -> None:
    sources = range(layout.world_size)
    words = [layout.poison_word(source) for source in sources]
    words += [layout.header_word(b, source, w) for b, source, w in product((6, 7), sources, range(HEADER_WORDS))]
    rows = range(layout.max_batch)
    words += [layout.result_word(b, k, row, source) for b, k, row, source in product((6, 7), (2, 5), rows, sources)]
    words += [layout.arrival_word(source, cta) for source, cta in product(sources, range(MAX_CTAS))]
    words += [layout.token_word(row, step) for row, step in product(rows, range(MAX_GAMMA))]
    words += [layout.slot_word(row, cta) for row, cta in product(rows, range(MAX_CTAS))]
    words += [layout.partial_word(k, row, cta) for k, row, cta in product((2, 5), rows, range(MAX_CTAS))]
    words += [layout.columns_word(source, cta) for source, cta in product(sources, range(MAX_CTAS))]
    words += [layout.sum_word(k, row, source) for k, row, source in product(range(MAX_GAMMA), rows, sources)]
    copies, posting = range(POST_COPIES), range(min(layout.world_size, POST_WORLD_SIZE))
    ctas = range(layout.num_ctas)
    words += [layout.post_word(*place) for place in product((6, 7), (2, 5), copies, posting, ctas)]
    assert all(word % WORD_BYTES == 0 for word in words)
    assert len(set(words)) == len(words)
    assert min(words) >= LINE_BYTES, "the first line is this rank's own"
    assert max(words) + WORD_BYTES <= layout.num_bytes


def test_writers_of_different_kinds_share_no_line() -> None:
    layout = MailboxLayout(3, 64, 132)
    starts = [layout.poison_offset, layout.headers_offset, layout.results_offset, layout.slots_offset]
    starts += [layout.arrivals_offset, layout.tokens_offset, layout.arrival_word(1, 3), layout.posts_offset]
    starts += [layout.partials_offset, layout.columns_offset, layout.sums_offset]
    assert all(start % LINE_BYTES == 0 for start in starts)
    own = [layout.block_offset, layout.first_block_offset, layout.last_tokens_offset]
    assert max(*own, layout.claim_offset, layout.in_flight_offset) < LINE_BYTES


def test_parities_alone_decide_where_a_result_lies() -> None:
    layout = MailboxLayout(2, 64, 132)
    places = {(b % 2, k % 2): layout.result_word(b, k, 5, 1) for b, k in product(range(1, 5), range(64))}
    assert len(set(places.values())) == 4
    assert all(layout.result_word(b, k, 5, 1) == places[b % 2, k % 2] for b, k in product(range(1, 5), range(64)))


def test_grids_and_batches_up_to_64_share_a_kernel() -> None:
    assert MailboxLayout(2, 1, 1).defines() == MailboxLayout(2, 64, MAX_CTAS).defines()
    assert MailboxLayout(2, 65, 1).defines() != MailboxLayout(2, 64, 1).defines()
    assert MailboxLayout(4, 64, 1).defines() != MailboxLayout(2, 64, 1).defines()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 1, 1), "world_size"),
        ((9, 1, 1), "world_size"),
        ((2, 0, 1), "max_batch"),
        ((2, 1 << 16, 1), "max_batch"),
        ((2, 1, 0), "num_ctas"),
        ((2, 1, MAX_CTAS + 1), "num_ctas"),
    ],
)
def test_what_no_mailbox_holds_is_refused_by_name(arguments: tuple[int, int, int], name: str) -> None:
    with pytest.raises(WalkInputError, match=name):
        MailboxLayout(*arguments)


# ---- tags, keys, headers ---------------------------------------------------------------------------------------------


def test_no_tag_is_that_of_zeroed_memory_and_no_two_are_equal() -> None:
    blocks = (0, 1, 2, 3, (1 << 40) - 1)
    tags = [step_tag(block, step, 7) for block, step in product(blocks, range(MAX_GAMMA))]
    tags += [tag(block) for block in blocks for tag in (header_tag, logits_tag)]
    assert 0 not in tags
    assert len(set(tags)) == len(tags)


def test_tags_wrap_around_with_the_block_number() -> None:
    assert step_tag(1 << 40, 3, 7) == step_tag(0, 3, 7) != 0
    assert header_tag((1 << 64) - 1) == header_tag((1 << 40) - 1) < 1 << 64


def test_tags_tell_tokens_apart() -> None:
    chains = {chain(token) for token in range(151_936)}
    assert len(chains) > 0.98 * (1 << 16), "two random tokens rarely share a chain"
    assert sum(chain(token) == chain(token + 1) for token in range(10_000)) == 0
    assert step_tag(5, 2, 10) >> BLOCK_SHIFT == 5


FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan"), float("inf"), -float("inf")])


@given(st.lists(st.tuples(FLOATS, st.integers(0, 2**32 - 1)), min_size=1, max_size=20))
def test_the_largest_key_is_the_definitions_choice(candidates: list[tuple[float, int]]) -> None:
    """NaN beats all, ties (+0 and -0 too) go to the smallest id."""
    best = max(candidates, key=lambda c: (np.isnan(c[0]), 0.0 if np.isnan(c[0]) else c[0], -c[1]))
    keys = [make_key(score, token) for score, token in candidates]
    assert key_token(max(keys)) == best[1]
    assert all(0 < key < 1 << 64 for key in keys), "0 stands for no candidate"


@pytest.mark.parametrize("name", HEADER_FIELDS)
def test_the_lowest_differing_bit_names_the_field(name: str) -> None:
    place = HEADER_FIELDS[name]
    values = dict.fromkeys(HEADER_FIELDS, 1)
    ours, theirs = pack_header(values), pack_header(values | {name: (1 << place.bits) - 1})
    (word,) = (word for word in range(HEADER_WORDS) if ours[word] != theirs[word])
    difference = ours[word] ^ theirs[word]
    assert header_field(word * 64 + (difference & -difference).bit_length() - 1) == name


def test_header_fields_tile_their_words() -> None:
    for word in range(HEADER_WORDS):
        bits = [range(place.shift, place.shift + place.bits) for place in HEADER_FIELDS.values() if place.word == word]
        assert sorted(bit for part in bits for bit in part) == list(range(64))
    with pytest.raises(WalkInputError, match="16 bits"):
        pack_header({"batch": 1 << 16})


# ---- status ----------------------------------------------------------------------------------------------------------

FAILED = WalkStatus(
    code=WalkCode.TIMEOUT,
    origin=1,
    wait=Wait.RESULT,
    source=0,
    step=3,
    row=5,
    expected=step_tag(17, 3, 9),
    seen=step_tag(16, 1, 9),
    block=17,
)


def test_status_survives_its_bytes_and_its_poison_word() -> None:
    assert len(FAILED.encode()) == STATUS_BYTES
    assert WalkStatus.decode(FAILED.encode()) == FAILED
    told = WalkStatus.from_poison(origin=1, key=FAILED.poison_key(), block=17)
    assert told.code == FAILED.code
    assert (told.wait, told.source, told.step, told.row, told.block) == (Wait.RESULT, 0, 3, 5, 17)


def test_status_fields_dont_overlap() -> None:
    taken = [byte for at, kind in STATUS_FIELDS.values() for byte in range(at, at + {"I": 4, "Q": 8}[kind])]
    assert sorted(taken) == list(range(STATUS_BYTES))


def test_a_timeout_says_who_waited_for_whom_and_where() -> None:
    error = FAILED.error(rank=1)
    assert isinstance(error, WalkTimeout)
    for part in ("rank 1", "rank 0", "step 3", "row 5", "block 17", hex(FAILED.expected), hex(FAILED.seen), "step 1"):
        assert part in str(error)
    told = WalkStatus.from_poison(1, FAILED.poison_key(), 17).error(rank=2)
    assert isinstance(told, WalkTimeout)
    assert "rank 2 was told" in str(told)
    assert "rank 1 waited" in str(told)


def test_a_mismatch_names_the_field_and_both_values() -> None:
    ours, theirs = pack_header({"batch": 4, "gamma": 7}), pack_header({"batch": 4, "gamma": 16})
    position = ((ours[0] ^ theirs[0]) & -(ours[0] ^ theirs[0])).bit_length() - 1
    status = WalkStatus(
        code=WalkCode.MISMATCH, origin=0, wait=Wait.HEADER, source=1, field=position, expected=ours[0], seen=theirs[0]
    )
    error = status.error(rank=0)
    assert isinstance(error, WalkMismatch)
    assert "ranks 0 and 1 were given different gamma: 7 and 16" in str(error)


@pytest.mark.parametrize(("wait", "part"), [(Wait.ARRIVAL, "base logits of rank 1"), (Wait.TOKEN, "token of rank 1")])
def test_a_wait_for_what_a_split_block_exchanges_says_so(wait: Wait, part: str) -> None:
    error = WalkStatus(code=WalkCode.TIMEOUT, origin=0, wait=wait, source=1, step=2, row=3).error(rank=0)
    assert isinstance(error, WalkTimeout)
    assert f"rank 0 waited past its deadline for the {part}" in str(error)


def test_divergence_is_a_mismatch_of_tokens() -> None:
    status = WalkStatus(code=WalkCode.MISMATCH, wait=Wait.RESULT, source=1, step=2, row=3)
    assert isinstance(status.error(rank=0), WalkMismatch)
    assert "different tokens" in str(status.error(rank=0))


def test_missing_logits_are_told_as_such() -> None:
    late = WalkStatus(
        code=WalkCode.TIMEOUT, origin=0, wait=Wait.LOGITS, source=1, expected=logits_tag(9), seen=logits_tag(8), block=9
    )
    assert isinstance(late.error(rank=0), WalkTimeout)
    assert "rank 0 waited past its deadline for the logits of rank 1" in str(late.error(rank=0))
    assert "block 8, logits" in str(late.error(rank=0))


def test_two_walks_at_once_are_an_error_of_their_own() -> None:
    error = WalkStatus(code=WalkCode.OVERLAP, origin=1, wait=Wait.HEADER, source=1, block=9).error(rank=1)
    assert isinstance(error, WalkOverlap)
    assert "rank 1 ran two walks of this runtime at once" in str(error)


@pytest.mark.parametrize("key", [0xDEADBEEF, 0x0302, (1 << 64) - 1, 0x02 | 1 << 8 | 200 << 48])
def test_a_corrupt_poison_word_is_an_error_all_the_same(key: int) -> None:
    error = WalkStatus.from_poison(origin=1, key=key, block=17).error(rank=0)
    assert error is not None
    assert "rank 0 was told by a peer: rank 1" in str(error)
    assert "corrupt" in str(error) or isinstance(error, WalkMismatch)


def test_no_failure_is_no_error() -> None:
    assert WalkStatus().error(rank=0) is None


# ---- the twins in csrc -----------------------------------------------------------------------------------------------


def assertions(layout: MailboxLayout) -> str:
    """Device code that compiles only where csrc computes what Python does."""
    top = layout.world_size - 1
    equal = {f"poison_offset({top})": layout.poison_word(top), f"header_tag({BLOCKS[4]}ull)": header_tag(BLOCKS[4])}
    for block in BLOCKS:
        equal[f"header_offset({block}ull, {top}, 2)"] = layout.header_word(block, top, 2)
        equal[f"header_tag({block}ull)"] = header_tag(block)
        equal[f"logits_tag({block}ull)"] = logits_tag(block)
        equal[f"lse_tag({block}ull, 63)"] = lse_tag(block, 63)
        for step, row in ((0, 0), (5, layout.max_batch - 1)):
            equal[f"result_offset({block}ull, {step}, {row}, {top})"] = layout.result_word(block, step, row, top)
            equal[f"slot_offset({row}, {step})"] = layout.slot_word(row, step)
            word, last = layout.num_ctas + 3, POST_COPIES - 1  # of CTA 3 of the second rank
            equal[f"post_offset({block}ull, {step}, {last}, {word})"] = layout.post_word(block, step, last, 1, 3)
            equal[f"token_offset({row}, {step})"] = layout.token_word(row, step)
            equal[f"arrival_offset({top}, {row})"] = layout.arrival_word(top, row)
            equal[f"partial_offset({step}, {row}, 131)"] = layout.partial_word(step, row, 131)
            equal[f"sum_offset({step}, {row}, {top})"] = layout.sum_word(step, row, top)
            equal[f"columns_offset({top}, {step})"] = layout.columns_word(top, step)
        for step, token in ((0, 0), (63, 151_935), (7, 2**32 - 1)):
            equal[f"step_tag({block}ull, {step}, {token}u)"] = step_tag(block, step, token)
    # As `ordered` leaves it to `ordered_bits`: no -0, and one NaN. That an addition of +0 sees to it, only a GPU shows.
    for score in (0.0, 1.5, -1.5, float("inf"), -float("inf"), 1e-45, -1e-45):
        bits = int(np.float32(score).view(np.int32))
        equal[f"make_key(ordered_bits({bits}), 12345u)"] = make_key(score, 12345)
    equal["make_key(ordered_bits(0x7fffffff), 3u)"] = make_key(float("nan"), 3)
    equal["make_key(kNothing, 3u)"] = 0
    equal["key_id(make_key(ordered_bits(0x3f800000), 77u))"] = 77
    status = WalkStatus(code=2, wait=3, source=7, step=63, row=65_000, field=191)
    equal["poison_key(2, Site{3, 7, 63, 65000}, 191)"] = status.poison_key()
    equal["poison_field<TPW_POISON_ROW_SHIFT, TPW_POISON_ROW_BITS>(poison_key(2, Site{3, 7, 63, 65000}, 191))"] = 65_000
    equal["diverged(step_tag(5, 3, 10), step_tag(5, 3, 11))"] = 1
    equal["diverged(step_tag(5, 3, 10), step_tag(5, 3, 10))"] = 0
    equal["diverged(step_tag(5, 3, 10), step_tag(5, 2, 11))"] = 0
    equal["diverged(step_tag(5, 3, 10), step_tag(4, 3, 11))"] = 0
    checks = "\n".join(f'static_assert({left} == {right}ull, "");' for left, right in equal.items())
    return f'#include "score.cuh"\n#include "watch.cuh"\nnamespace tpw {{\n{checks}\n}}\n'


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_csrc_computes_the_same(layout: MailboxLayout) -> None:
    jit.compile_source(assertions(layout), "twins.cu", layout.defines() | status_defines(), "sm_90a")


@pytest.mark.parametrize(
    "macro",
    [
        "TPW_RESULTS_STEP_STRIDE",
        "TPW_RESULTS_OFFSET",
        "TPW_SLOTS_ROW_STRIDE",
        "TPW_ARRIVALS_CTA_STRIDE",
        "TPW_TOKENS_ROW_STRIDE",
        "TPW_HEADERS_SOURCE_STRIDE",
        "TPW_POISON_OFFSET",
        "TPW_PARTIALS_STEP_STRIDE",
        "TPW_SUMS_ROW_STRIDE",
        "TPW_COLUMNS_SOURCE_STRIDE",
        "TPW_LOGITS_PHASE",
        "TPW_POSTS_COPY_STRIDE",
        "TPW_POSTS_STEP_STRIDE",
        "TPW_HEADER_PHASE",
        "TPW_CHAIN_MULTIPLIER",
        "TPW_POISON_ROW_SHIFT",
    ],
)
def test_a_number_that_differs_is_noticed(macro: str) -> None:
    layout = LAYOUTS[1]
    macros = layout.defines() | status_defines()
    with pytest.raises(KernelError, match="static assertion"):
        jit.compile_source(assertions(layout), "twins.cu", macros | {macro: macros[macro] + 2}, "sm_90a")


def test_phases_leave_room_for_every_step() -> None:
    assert MAX_GAMMA < LOGITS_PHASE < HEADER_PHASE
