"""Builds of the kernels that are not the production one: slower, stalled on purpose, or without a rule that they need.

An edit replaces passages of csrc, which must be there, so that a variant can't silently become the production build.
`use` makes this process compile from the edited sources; what is cached is named by their hash.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tp_walk import jit, precompile


@dataclass(frozen=True)
class Edit:
    """In a file of csrc each match of a regular expression becomes `new`, a template as of re.sub."""

    file: str
    pattern: str
    new: str


# A host can hold the walk of its rank in a step: these words of the rank's own line, which the exchange leaves alone,
# hold the step + 1, until when, in ns after the launch's own deadline (a negative number: before it), and either 0, so
# that all CTAs stand still before they contribute, or the row + 1 whose result alone is withheld. (The result of a
# single row on two ranks is all CTAs' posts.)
STALL_STEP_OFFSET, STALL_UNTIL_OFFSET, STALL_ROW_OFFSET = 64, 72, 80

_CONTRIBUTE = r"void contribute\([^)]*\) const \{\n"
_POST = r"void post\([^)]*\) const \{\n"
_PUBLISH = r" +if \(lane < kAgreeingRanks\) store_word<Scope::sys>\(result_word\(.*\n"


def _stall(row: str) -> str:
    """`row` stands for what a host must have asked for."""
    return f"""        if (step + 1 == static_cast<int>(load_control(mailbox(), {STALL_STEP_OFFSET})) &&
            {row} == static_cast<int>(load_control(mailbox(), {STALL_ROW_OFFSET}))) {{
            const u64 until = expiry + load_control(mailbox(), {STALL_UNTIL_OFFSET});
            while (now_ns() < until) __nanosleep(1000);
        }}
"""


# One access in 256 waits up to 8 µs, so that every order of stores and loads that the hardware allows comes up; and in
# one block of 16 CTA 0 comes up to 65 µs late to the last results, when a peer may long have begun the next block.
_DELAY = """__device__ __forceinline__ void maybe_wait() {
    u32 clock;
    asm volatile("mov.u32 %0, %clock;" : "=r"(clock));
    clock = (clock ^ threadIdx.x ^ (blockIdx.x << 10)) * 0x9e3779b1u;
    if (clock >> 24 == 0) __nanosleep(clock & 8191u);
}

__device__ __forceinline__ void maybe_come_late() {
    u32 clock;
    asm volatile("mov.u32 %0, %clock;" : "=r"(clock));
    clock *= 0x9e3779b1u;
    if (clock >> 28 == 0) __nanosleep(clock & 65535u);
}

"""
_TEMPLATE = "template <Scope scope>\n__device__ __forceinline__ "
_STORE = re.escape(_TEMPLATE + "void store_word(char* address, u64 key, u64 tag) {\n")
_LOAD = re.escape(_TEMPLATE + "Word load_word(const char* address) {\n")
_LOAD_IF = re.escape("__device__ __forceinline__ void load_word_if(bool wanted, const char* address, Word& word) {\n")
_DELAYS = (
    Edit("mailbox.cuh", _STORE, _DELAY + r"\g<0>    maybe_wait();" + "\n"),
    Edit("mailbox.cuh", _LOAD, r"\g<0>    maybe_wait();" + "\n"),
    Edit("mailbox.cuh", _LOAD_IF, r"\g<0>    maybe_wait();" + "\n"),
    Edit("walk.cu", r"void finish\(\) const \{\n", r"\g<0>        maybe_come_late();" + "\n"),
)
_STEP_TAG = re.escape(
    "return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | u64(chain(previous)) << TPW_PHASE_BITS | (step + 1);"
)
_STEP_PARITY = r"\(step & 1\) \* TPW_\w+_STEP_STRIDE"
_BLOCK_PARITY = r"u32\(block & 1\) \* TPW_\w+_BLOCK_STRIDE"
_AWAIT_HEADER = "    u64 theirs = own;\n"

VARIANTS: dict[str, tuple[Edit, ...]] = {
    "production": (),
    "stalled": (
        Edit("exchange.cuh", _CONTRIBUTE, r"\g<0>" + _stall("0")),
        Edit("exchange.cuh", _POST, r"\g<0>" + _stall("0") + _stall("1")),
        Edit("exchange.cuh", _PUBLISH, _stall("row + 1") + r"\g<0>"),
    ),
    "delays": _DELAYS,
}

# Each without a rule that the protocol needs, and with delays that give the consequences a chance.
BROKEN: dict[str, tuple[Edit, ...]] = {
    "no step parity: a result overwrites the one before": (
        Edit("mailbox.cuh", _STEP_PARITY, "0"),
        *_DELAYS,
    ),
    "no block parity, and no wait for headers": (
        Edit("mailbox.cuh", _BLOCK_PARITY, "0"),
        Edit("watch.cuh", _AWAIT_HEADER, r"    return true;\g<0>"),
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
    "slots cleared once they are read: that races with the next step's": (
        Edit(
            "exchange.cuh",
            _PUBLISH,
            r"""\g<0>
        for (int cta = lane; cta < ctas; cta += kWarpSize) store_word<Scope::gpu>(slot_word(mailbox(), row, cta), 0, 0);
""",
        ),
        *_DELAYS,
    ),
    "a word in two halves, the tag not released after the key: a new tag with the old key": (
        Edit(
            "mailbox.cuh",
            _STORE + re.escape("    const u64 at = __cvta_generic_to_global(address);\n"),
            _DELAY
            + r"""\g<0>
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
        ValueError: an edit's pattern isn't in its file; the sources have changed, the edit must follow.
    """
    texts = {path.name: path.read_text() for path in jit.csrc_dir().iterdir() if path.is_file()}
    for edit in {**VARIANTS, **BROKEN}[name]:
        texts[edit.file], count = re.subn(edit.pattern, edit.new, texts[edit.file])
        if not count:
            raise ValueError(f"variant {name!r}: {edit.file} doesn't hold:\n{edit.pattern}")
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


@dataclass(frozen=True)
class VariantJob(precompile.Job):
    """One cubin of a variant."""

    variant: str

    def compile(self, arch: str) -> jit.CompiledKernel:
        use(self.variant)
        return super().compile(arch)


def compile_ahead(names: Sequence[str], vocab_size: int, world: int, plans: Sequence[str] = ("tp_bf16",)) -> None:
    """Fills the cache, on all cores, with what runtimes of `world` ranks want for these plans on this machine."""
    target = precompile.current_gpu()
    jobs = [
        job
        for job in precompile.jobs(vocab_size, 256, [world], 64, ["engine"], target)
        if job.source != "walk.cu" or job.purpose.startswith(tuple(f"{plan} " for plan in plans))
    ]
    wanted = [VariantJob(job.purpose, job.source, job.entry, job.macros, name) for name in names for job in jobs]
    precompile.compile_together(wanted, target.arch)
