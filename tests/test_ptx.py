"""The compiled kernels keep to the model: mailbox accesses have the width, order and scope that mailbox.cuh argues for.

The protocol's model is about indivisible words; here the PTX of every kernel is searched for accesses to mailboxes, and
mutations of the source show that a weaker access is found.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from ptx_access import ORDER, Access, accesses, compile_to_ptx

from tp_walk import jit, kernels, pair_test, spread, timing
from tp_walk.config import LOGITS_MODES
from tp_walk.mailbox import MailboxLayout
from tp_walk.placement import ColumnUse
from tp_walk.status import STATUS_FIELDS

LAYOUT = MailboxLayout(world_size=2, max_batch=64, num_ctas=132)

SYS_WORD = {"ld.relaxed.sys.global.b128", "st.relaxed.sys.global.b128"}
GPU_WORD = {"ld.relaxed.gpu.global.b128", "st.relaxed.gpu.global.b128"}
FENCE, COPIED = "fence.acq_rel.sys", "cp.async.bulk.wait_group"
# Of csrc/spread.cu, in the order of its text; the first stores are those of a rank into its own buffer.
TRANSFER = ["store", "fence", "st headers", "ld headers", "fence"]
TRANSFER += ["store", "fence", "st arrivals", "ld arrivals", "fence"]
OWN_NUMBER = {"ld.relaxed.gpu.global.u64", "st.relaxed.gpu.global.u64"}

REGIONS = {
    LAYOUT.block_offset: "own numbers",
    LAYOUT.claim_offset: "claim",
    LAYOUT.in_flight_offset: "in flight",
    LAYOUT.poison_offset: "poison",
    LAYOUT.headers_offset: "headers",
    LAYOUT.results_offset: "results",
    LAYOUT.slots_offset: "slots",
    LAYOUT.arrivals_offset: "arrivals",
    LAYOUT.tokens_offset: "tokens",
    LAYOUT.posts_offset: "posts",
    LAYOUT.partials_offset: "partials",
    LAYOUT.columns_offset: "columns",
    LAYOUT.sums_offset: "sums",
}

# By region, the instructions that the argument in mailbox.cuh allows a kernel and needs: each must occur, and no other.
EVERY_KERNEL = {
    "own numbers": OWN_NUMBER,
    "claim": {"atom.exch.b32"},
    "in flight": {"atom.exch.b32"},
    "poison": SYS_WORD,
}
WALK = EVERY_KERNEL | {"headers": SYS_WORD, "results": SYS_WORD, "slots": GPU_WORD}
# Where every rank holds all of W2, ranks agree on nothing at a step, and csrc/spread.cu compares headers.
INT8_WALK = EVERY_KERNEL | {"results": SYS_WORD, "slots": GPU_WORD, "tokens": SYS_WORD}
# Kernels for one request alone have no aggregators.
SINGLE_WALK = EVERY_KERNEL | {"headers": SYS_WORD, "posts": SYS_WORD}
INT8_SINGLE_WALK = EVERY_KERNEL | {"tokens": SYS_WORD, "posts": SYS_WORD}
# Of what is only reported, by what a kernel reports; others have none of it.
SUMS = {"partials": GPU_WORD, "sums": SYS_WORD}
REPORTS: dict[str, dict[str, set[str]]] = {"none": {}, "local": SUMS, "full": SUMS | {"columns": SYS_WORD}}
SPREAD = EVERY_KERNEL | {
    "own numbers": {"ld.relaxed.gpu.global.u64"},
    "headers": SYS_WORD,
    "arrivals": SYS_WORD,
}


def region_of(offset: int) -> str:
    return REGIONS[max(start for start in REGIONS if start <= offset)]


def walk_macros(
    *,
    int8: bool = False,
    sampled: bool = False,
    logits: str = "none",
    groups: int = 1,
    narrow: bool = False,
    single: bool = False,
) -> dict[str, int]:
    """Of one of the kernels that a runtime of 2 ranks loads."""
    columns = ColumnUse(groups, narrow or (single and not int8), single)
    (macros,) = (
        one.macros
        for one in kernels.specialisations(
            int8=int8,
            markov_rank=256,
            rows=75_968,
            world_size=LAYOUT.world_size,
            max_batch=LAYOUT.max_batch,
            rounding="engine",
            num_sms=LAYOUT.num_ctas,
            shared_limit=232_448,
        )
        if (one.sampled, one.logits, one.columns) == (sampled, logits, columns)
    )
    return macros


def walk_pointers() -> dict[int, str]:
    start, size = kernels.WalkParams.mailboxes.offset, kernels.WalkParams.mailboxes.size
    mailboxes = {start + 8 * rank: "mailboxes" for rank in range(size // 8)}
    logits = {kernels.WalkParams.logits.offset + 8 * rank: "logits" for rank in range(size // 8)}
    return mailboxes | logits | {kernels.WalkParams.status.offset: "status"}


def spread_pointers() -> dict[int, str]:
    """Of csrc/spread.cu's two parameters, one behind the other."""
    start, size = ctypes.sizeof(kernels.WalkParams), spread.SpreadParams.buffers.size
    return walk_pointers() | {start + 8 * rank: "buffers" for rank in range(size // 8)}


def mailbox_faults(found: list[Access], allowed: dict[str, set[str]]) -> list[str]:
    """What breaks the argument, in words."""
    faults, seen = [], {name: set() for name in REGIONS.values()}
    for access in found:
        if access.pointer == "mailboxes":
            region = region_of(access.offset)
            seen[region].add(access.opcode)
            if access.opcode not in allowed.get(region, ()):
                faults.append(f"{access.opcode} of {region}")
    for region, opcodes in allowed.items():
        faults += [f"no {opcode} of {region}" for opcode in sorted(opcodes - seen[region])]
    return faults


def transfer_faults(found: list[Access]) -> list[str]:
    """Base logits in peers' buffers are stored between fences: behind the one that follows the headers, before the one
    that releases the arrival; and what is seen of an arrival is acquired.
    """
    faults = []
    events = []
    for access in found:
        if access.pointer == "buffers":
            if not access.opcode.startswith("st.global."):
                faults.append(f"{access.opcode} of buffers")
            events.append("store")
        elif access.opcode == FENCE:
            events.append("fence")
        elif access.pointer == "mailboxes" and region_of(access.offset) in ("headers", "arrivals"):
            events.append(f"{access.opcode[:2]} {region_of(access.offset)}")
    order = [event for event, _ in itertools.groupby(events)]
    if order != TRANSFER:
        faults.append(f"the order is {order}")
    return faults


def status_faults(found: list[Access]) -> list[str]:
    """The code is released, after every other field."""
    faults = []
    fields = {at: (name, {"I": "u32", "Q": "u64"}[kind]) for name, (at, kind) in STATUS_FIELDS.items()}
    stored: set[str] = set()
    of_failure = {name for name, _ in fields.values()} - {"code", "clamped_row", "clamped_block"}
    for access in (access for access in found if access.pointer == "status"):
        name, kind = fields[access.offset]
        order = "release" if name == "code" else "relaxed"
        if access.opcode != f"st.{order}.sys.global.{kind}":
            faults.append(f"{access.opcode} of status {name}")
        if name == "code":
            faults += [f"status {missing} isn't stored before the code" for missing in of_failure - stored]
            stored.clear()
        stored.add(name)
    if not any(access.pointer == "status" for access in found):
        faults.append("no status is stored")
    return faults


def is_word(access: Access, kind: str | tuple[str, ...], region: str) -> bool:
    return access.pointer == "mailboxes" and access.opcode.startswith(kind) and region_of(access.offset) == region


def logits_faults(found: list[Access], logits: str) -> list[str]:
    """Logits are written after the headers of all ranks and before the columns words, with fences in between."""
    writes = [i for i, access in enumerate(found) if access.pointer == "logits" and not access.opcode.startswith("ld")]
    allowed = {
        "cp.async.bulk.global.shared::cta.bulk_group",
        "st.global.v4.b32",
        "st.global.v4.u32",
        "st.global.b16",
        "st.global.u16",
    }
    faults = [f"{opcode} of logits" for opcode in sorted({found[i].opcode for i in writes} - allowed)]
    if not writes or logits != "full":
        return faults if writes or logits == "none" else ["no logits are written"]

    def between(what: str, first: int, last: int) -> list[str]:
        """The fences and barriers there, in order."""
        if first > last:
            faults.append(f"{what} in another order")
        return [access.opcode for access in found[first:last] if access.pointer == ORDER]

    headers = [i for i, access in enumerate(found) if is_word(access, ("ld", "st"), "headers")]
    announced = [i for i, access in enumerate(found) if is_word(access, "st", "columns")]
    awaited = [i for i, access in enumerate(found) if is_word(access, "ld", "columns")]
    if FENCE not in between("header sent", 0, next(i for i, a in enumerate(found) if is_word(a, "st", "headers"))):
        faults.append("no fence before the header")
    if FENCE not in between("header, logits", headers[-1], writes[0]):
        faults.append("no fence between headers and logits")
    publishing = between("logits, columns", writes[-1], announced[0])
    if [opcode for opcode in publishing if not opcode.endswith("read")][-3:] != [COPIED, "bar.sync", FENCE]:
        faults.append(f"logits are published by {publishing}")
    if FENCE not in between("columns, end", awaited[-1], len(found)):
        faults.append("no fence after the columns")
    return faults


def walk_faults(folder: Path, macros: dict[str, int]) -> list[str]:
    found = accesses(compile_to_ptx(folder, "walk.cu", macros), "walk", walk_pointers())
    logits = LOGITS_MODES[macros["TPW_LOGITS"]]
    if macros["TPW_SINGLE"]:
        allowed = INT8_SINGLE_WALK if macros["TPW_INT8"] else SINGLE_WALK
    else:
        allowed = INT8_WALK if macros["TPW_INT8"] else WALK
    allowed = allowed | REPORTS[logits]
    return mailbox_faults(found, allowed) + logits_faults(found, logits) + status_faults(found)


def spread_faults(folder: Path) -> list[str]:
    macros = spread.spread_macros(LAYOUT.world_size, LAYOUT.max_batch, base_fp32=False)
    found = accesses(compile_to_ptx(folder, "spread.cu", macros), "spread", spread_pointers())
    return mailbox_faults(found, SPREAD) + status_faults(found) + transfer_faults(found)


@pytest.mark.parametrize(
    "kernel",
    [
        {},
        {"single": True},
        {"sampled": True, "narrow": True},
        {"groups": 2},
        {"sampled": True, "logits": "local", "groups": 2},
        {"logits": "full", "single": True},
        {"sampled": True, "logits": "full", "narrow": True},
        {"sampled": True, "logits": "full", "groups": 2},
        {"int8": True},
        {"int8": True, "single": True},
        {"int8": True, "logits": "local"},
    ],
    ids=str,
)
def test_walk_touches_mailboxes_as_the_model_does(kernel: dict[str, Any]) -> None:
    assert walk_faults(jit.csrc_dir(), walk_macros(**kernel)) == []


def test_the_exchange_of_base_logits_does_and_fences_what_carries_no_tag() -> None:
    assert spread_faults(jit.csrc_dir()) == []


def test_the_pair_self_test_uses_the_walks_instructions() -> None:
    ptx = compile_to_ptx(jit.csrc_dir(), "pair_test.cu", pair_test.macros())
    found = accesses(ptx, "pair_test", {0: "own", 8: "peer"})
    assert {(access.pointer, access.opcode) for access in found} == {
        ("own", "ld.relaxed.sys.global.b128"),
        ("peer", "st.relaxed.sys.global.b128"),
    }


def test_the_gate_of_the_bench_does_too() -> None:
    ptx = compile_to_ptx(jit.csrc_dir(), "gate.cu", timing.gate_macros(2))
    start, size = timing.GateParams.arrivals.offset, timing.GateParams.arrivals.size
    found = accesses(ptx, "gate", {start + at: "arrivals" for at in range(0, size, 8)})
    assert {access.opcode for access in found} == SYS_WORD


# A weaker access, and a fault that must be reported for it.
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "a result in two halves": (
        "mailbox.cuh",
        "mov.b128 word, {%1, %2}; st.relaxed.sys.global.b128 [%0], word;",
        "st.relaxed.sys.global.v2.b64 [%0], {%1, %2};",
        "st.relaxed.sys.global.v2.b64 of results",
    ),
    "a slot read in two halves": (
        "mailbox.cuh",
        "ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word;",
        "ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];",
        "ld.relaxed.gpu.global.v2.b64 of slots",
    ),
    "weak stores": (
        "mailbox.cuh",
        "st.relaxed.sys.global.b128",
        "st.global.b128",
        "st.global.b128 of results",
    ),
    "results seen by this GPU alone": (
        "exchange.cuh",
        "store_word<Scope::sys>(result_word(",
        "store_word<Scope::gpu>(result_word(",
        "st.relaxed.gpu.global.b128 of results",
    ),
    "posts seen by this GPU alone": (
        "mailbox.cuh",
        "@wanted ld.relaxed.sys.global.b128",
        "@wanted ld.relaxed.gpu.global.b128",
        "ld.relaxed.gpu.global.b128 of posts",
    ),
    "posts read in two halves": (
        "mailbox.cuh",
        "@wanted ld.relaxed.sys.global.b128 word, [%2];\\n  mov.b128 {%0, %1}, word;",
        "@wanted ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];",
        "ld.relaxed.sys.global.v2.b64 of posts",
    ),
    "poison looked for on this GPU alone": (
        "watch.cuh",
        "load_word<Scope::sys>(poison_word(",
        "load_word<Scope::gpu>(poison_word(",
        "ld.relaxed.gpu.global.b128 of poison",
    ),
    "slots of this CTA alone": (
        "mailbox.cuh",
        "st.relaxed.gpu.global.b128",
        "st.relaxed.cta.global.b128",
        "st.relaxed.cta.global.b128 of slots",
    ),
    "the status code isn't released": (
        "watch.cuh",
        "st.release.sys.global.u32",
        "st.relaxed.sys.global.u32",
        "st.relaxed.sys.global.u32 of status code",
    ),
}


@pytest.mark.parametrize(("file", "right", "wrong", "fault"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_weaker_access_is_found(tmp_path: Path, file: str, right: str, wrong: str, fault: str) -> None:
    folder = shutil.copytree(jit.csrc_dir(), tmp_path / "csrc")
    source = (folder / file).read_text()
    assert right in source, "the mutation has nothing to change any more"
    (folder / file).write_text(source.replace(right, wrong))
    assert fault in walk_faults(folder, walk_macros(sampled=True, narrow=True, single="posts" in fault))


SPREAD_MUTATIONS: dict[str, tuple[str, str, str]] = {
    "arrivals that release nothing": (
        "        fence_system();\n        store_word<Scope::sys>(arrival_word(",
        "        store_word<Scope::sys>(arrival_word(",
        "'store', 'st arrivals'",
    ),
    "arrivals that acquire nothing": ("        fence_system();\n    }\n}", "    }\n}", "'ld arrivals']"),
    "stores that may come before the peer's header": (
        "true);\n        fence_system();\n",
        "true);\n",
        "'ld headers', 'store'",
    ),
    "arrivals seen by this GPU alone": (
        "store_word<Scope::sys>(arrival_word(",
        "store_word<Scope::gpu>(arrival_word(",
        "st.relaxed.gpu.global.b128 of arrivals",
    ),
}


@pytest.mark.parametrize(("right", "wrong", "fault"), SPREAD_MUTATIONS.values(), ids=SPREAD_MUTATIONS)
def test_a_weaker_transfer_is_found(tmp_path: Path, right: str, wrong: str, fault: str) -> None:
    folder = shutil.copytree(jit.csrc_dir(), tmp_path / "csrc")
    source = (folder / "spread.cu").read_text()
    assert right in source, "the mutation has nothing to change any more"
    (folder / "spread.cu").write_text(source.replace(right, wrong))
    assert any(fault in found for found in spread_faults(folder))


# What publishes logits in peers' memory, taken away: (file, what is there, what is left), and the fault's beginning.
UNORDERED: dict[str, tuple[str, str, str, str]] = {
    "the header doesn't release the reads of the block before": (
        "exchange.cuh",
        "if constexpr (kPeerLogits) fence_system();\n        if (lane < TPW_WORLD_SIZE)",
        "if (lane < TPW_WORLD_SIZE)",
        "no fence before the header",
    ),
    "headers aren't acquired before logits are written": (
        "exchange.cuh",
        "if constexpr (kPeerLogits) fence_system();\n        return __all_sync",
        "return __all_sync",
        "no fence between headers and logits",
    ),
    "copies have been read but not written": (
        "async_copy.cuh",
        "cp.async.bulk.wait_group 0;",
        "cp.async.bulk.wait_group.read 0;",
        "logits are published by",
    ),
    "a warp's copies aren't waited for": (
        "walk.cu",
        "named_barrier(kServiceBarrier, kServiceThreads);\n                if (passes.count > 0 && ",
        "if (passes.count > 0 && ",
        "logits are published by",
    ),
    "logits aren't released": (
        "logits.cuh",
        "fence_system();\n        if (cta.lane",
        "if (cta.lane",
        "logits are published by",
    ),
    "the peers' logits aren't acquired": (
        "logits.cuh",
        "fence_system();\n        return true;",
        "return true;",
        "no fence after the columns",
    ),
}


@pytest.mark.parametrize(("file", "right", "wrong", "fault"), UNORDERED.values(), ids=UNORDERED)
def test_logits_without_their_order_are_found(tmp_path: Path, file: str, right: str, wrong: str, fault: str) -> None:
    folder = shutil.copytree(jit.csrc_dir(), tmp_path / "csrc")
    source = (folder / file).read_text()
    assert right in source, "the mutation has nothing to change any more"
    (folder / file).write_text(source.replace(right, wrong))
    faults = walk_faults(folder, walk_macros(sampled=True, logits="full", narrow=True))
    assert any(found.startswith(fault) for found in faults), faults
