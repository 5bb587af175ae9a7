"""Builds of the kernels that are not the production one: slower, stalled on purpose, or without a rule that they need.

An edit replaces one passage of csrc, which must be there exactly once, so that a variant can't silently become the
production build. `use` makes this process compile from the edited sources; what is cached is named by their hash.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from tp_walk import jit, precompile
from tp_walk.config import Rounding


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` in a file of csrc."""

    file: str
    old: str
    new: str


# A host can hold the walk of its rank in a step: these words of the rank's own line, which the exchange leaves alone,
# hold the step + 1 and until when, in ns after the launch's own deadline (a negative number: before it).
STALL_STEP_OFFSET, STALL_UNTIL_OFFSET = 64, 72

_CONTRIBUTE = "void contribute(int lane, int step, int row, u32 previous, int cta, u64 key) const {\n"
_STALL = f"""        if (step + 1 == static_cast<int>(load_control(mailbox(), {STALL_STEP_OFFSET}))) {{
            const u64 until = *expiry + load_control(mailbox(), {STALL_UNTIL_OFFSET});
            while (now_ns() < until) __nanosleep(1000);
        }}
"""

# One access in 256 waits up to 8 µs, so that every order of stores and loads that the hardware allows comes up.
_DELAY = """__device__ __forceinline__ void maybe_wait() {
    u32 clock;
    asm volatile("mov.u32 %0, %clock;" : "=r"(clock));
    clock = (clock ^ threadIdx.x ^ (blockIdx.x << 10)) * 0x9e3779b1u;
    if (clock >> 24 == 0) __nanosleep(clock & 8191u);
}

"""
_TEMPLATE = "template <Scope scope>\n__device__ __forceinline__ "
_STORE = _TEMPLATE + "void store_word(char* address, u64 key, u64 tag) {\n"
_LOAD = _TEMPLATE + "Word load_word(const char* address) {\n"
_DELAYS = (
    Edit("mailbox.cuh", _STORE, _DELAY + _STORE + "    maybe_wait();\n"),
    Edit("mailbox.cuh", _LOAD, _LOAD + "    maybe_wait();\n"),
)
_STEP_TAG = "return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | u64(chain(previous)) << TPW_PHASE_BITS | (step + 1);"
_RESULT = "u32(block & 1) * TPW_RESULTS_BLOCK_STRIDE + (step & 1) * TPW_RESULTS_STEP_STRIDE"
_HEADER = "u32(block & 1) * TPW_HEADERS_BLOCK_STRIDE"
_AWAIT_HEADER = "    u64 theirs = own;\n"

VARIANTS: dict[str, tuple[Edit, ...]] = {
    "production": (),
    "stalled": (Edit("exchange.cuh", _CONTRIBUTE, _CONTRIBUTE + _STALL),),
    "delays": _DELAYS,
}

# Each without a rule that the protocol needs, and with delays that give the consequences a chance.
BROKEN: dict[str, tuple[Edit, ...]] = {
    "no step parity: a result overwrites the one before": (
        Edit("mailbox.cuh", _RESULT, "u32(block & 1) * TPW_RESULTS_BLOCK_STRIDE"),
        *_DELAYS,
    ),
    "no block parity, and no wait for headers": (
        Edit("mailbox.cuh", _RESULT, "(step & 1) * TPW_RESULTS_STEP_STRIDE"),
        Edit("mailbox.cuh", _HEADER, "0"),
        Edit("watch.cuh", _AWAIT_HEADER, "    return true;\n" + _AWAIT_HEADER),
        *_DELAYS,
    ),
    "no block in the tag: words of two blocks ago pass for new": (
        Edit("mailbox.cuh", _STEP_TAG, "return u64(chain(previous)) << TPW_PHASE_BITS | (step + 1);"),
        *_DELAYS,
    ),
    "no step and no token in the tag: the slot of the step before passes for new": (
        Edit("mailbox.cuh", _STEP_TAG, "return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | 1;"),
        *_DELAYS,
    ),
    "a word in two halves, tag first: a new tag with the old key": (
        Edit(
            "mailbox.cuh",
            _STORE + "    const u64 at = __cvta_generic_to_global(address);\n",
            _DELAY
            + _STORE
            + """    const u64 at = __cvta_generic_to_global(address);
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at + 8), "l"(tag) : "memory");
    maybe_wait();
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(key) : "memory");
    return;
""",
        ),
    ),
}


def edited(name: str, folder: Path) -> Path:
    """Writes the variant's sources into `folder` and returns it.

    Raises:
        ValueError: an edit's passage isn't in its file exactly once; the sources have changed, the edit must follow.
    """
    texts = {path.name: path.read_text() for path in jit.csrc_dir().iterdir() if path.is_file()}
    for edit in {**VARIANTS, **BROKEN}[name]:
        if texts[edit.file].count(edit.old) != 1:
            raise ValueError(f"variant {name!r}: {edit.file} holds {texts[edit.file].count(edit.old)} of:\n{edit.old}")
        texts[edit.file] = texts[edit.file].replace(edit.old, edit.new)
    for file, text in texts.items():
        (folder / file).write_text(text)
    return folder


_in_use = ExitStack()


def use(name: str) -> None:
    """From now on this process compiles this variant."""
    _in_use.close()
    folder = _in_use.enter_context(tempfile.TemporaryDirectory(prefix="csrc-"))
    sources = edited(name, Path(folder))
    _in_use.enter_context(mock.patch.object(jit, "csrc_dir", return_value=sources))


def compile_ahead(names: Sequence[str], vocab_size: int, worlds: Sequence[int], rounding: Rounding = "engine") -> None:
    """Fills the cache with the variants' kernels for this machine's GPU, on all cores."""
    target = precompile.current_gpu()
    jobs = precompile.jobs(vocab_size, 256, worlds, 64, [rounding], target)
    for name in names:
        precompile.compile_together(jobs, target.arch, partial(use, name))
