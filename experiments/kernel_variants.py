"""Builds of the kernels that are not the production one: slower, stalled on purpose, without a rule that they need, or
without a part of their work.

An edit replaces passages of csrc, which must be there, so that a variant can't silently become the production build.
`use` makes this process compile from the edited sources; what is cached is named by their hash.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tp_walk import executors, jit, kernels, precompile
from tp_walk.kernels import Specialisation
from tp_walk.plan import PLAN_NAMES
from tp_walk.precompile import Target


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
    Edit(
        "walk.cu",
        r"void bring_u\([^)]*\) const \{\n",
        r"\g<0>        if (next.index >= passes.count) maybe_come_late();" + "\n",
    ),
)
_STEP_TAG = re.escape(
    "return block << (TPW_PHASE_BITS + TPW_CHAIN_BITS) | u64(chain(previous)) << TPW_PHASE_BITS | (step + 1);"
)
_STEP_PARITY = r"\(step & 1\) \* TPW_\w+_STEP_STRIDE"
_BLOCK_PARITY = r"u32\(block & 1\) \* TPW_\w+_BLOCK_STRIDE"
_AWAIT_HEADER = "    u64 theirs = own;\n"

# In production a warp's lanes meet, and the first one arrives for all: racecheck sees that it has, not the others.
EACH_LANE_ARRIVES = "each lane arrives"

VARIANTS: dict[str, tuple[Edit, ...]] = {
    "production": (),
    "stalled": (
        Edit("exchange.cuh", _CONTRIBUTE, r"\g<0>" + _stall("0")),
        Edit("exchange.cuh", _POST, r"\g<0>" + _stall("0") + _stall("1")),
        Edit("exchange.cuh", _PUBLISH, _stall("row + 1") + r"\g<0>"),
    ),
    "delays": _DELAYS,
    EACH_LANE_ARRIVES: (
        Edit("walk.cu", r"if \((cta\.)?lane == 0\) (mbarrier_arrive\()", r"\g<2>"),
        Edit("walk.cu", r"(u_ready|contributed)(\[buffer\], )kServiceWarps", r"\g<1>\g<2>kServiceThreads"),
        Edit(
            "walk.cu", r"(best_ready\[buffer\], kMultiplyWarps|kByWarpgroups \? kMultiplyWarps)", r"\g<1> * kWarpSize"
        ),
        Edit("multiply_warpgroup.cuh", r"if \(cta\.lane == 0\) (mbarrier_arrive\()", r"\g<1>"),
    ),
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

# ---- parts left out --------------------------------------------------------------------------------------------------
# Their tokens are wrong, and never compared; waits keep their deadlines. Where a part made values that others need,
# cheap ones that the compiler can't know take their place, and what would be thrown away unused is still waited for.

_KEEP = """
// Waits for values, which nobody reads.
__device__ __forceinline__ void keep(const Smem& s, uint32_t mixed) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared_address(&s.rows[0].unused)), "r"(mixed) : "memory");
}

__device__ __forceinline__ void keep(const Smem& s, const Fragment (&weights)[kRegTiles][kSteps]) {
    uint32_t mixed = 0;
#pragma unroll
    for (int i = 0; i < kRegTiles; ++i)
#pragma unroll
        for (int k = 0; k < kSteps; ++k) mixed ^= weights[i][k].x ^ weights[i][k].y ^ weights[i][k].z ^ weights[i][k].w;
    keep(s, mixed);
}

"""
_FIRST_WAIT = r" +if \(index == 0\) mbarrier_wait\(&s.control->weights_arrived, 0\);\n"

_PRODUCT = """
// Stands for the n-th dot product of a chunk: small, another one for each lane, chunk, pass and n.
__device__ __forceinline__ Dot::Accumulator product(uint32_t seed, int n) {
    const uint32_t bits = seed ^ (n * 0x9e3779b1u & 0xffffu);
    if constexpr (TPW_INT8)
        return static_cast<int32_t>(bits & 0x1ffffu);
    else
        return __uint_as_float(bits);
}

__device__ __forceinline__ uint32_t product_seed(const Cta& cta, const Pass& pass, int slot) {
    const uint32_t mixed = cta.lane * 0x85ebca6bu + pass.index * 0x9e3779b1u + slot * 0xc2b2ae35u;
    return 0x3d000000u | (mixed & 0x7fffffu);
}

"""
_PRODUCTS = """    const uint32_t seed = product_seed(cta, pass, {slot});
#pragma unroll
    for (int i = 0; i < {tiles}; ++i)
#pragma unroll
        for (int group = 0; group < {groups}; ++group)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][group][j] = product(seed, (i * {groups} + group) * 4 + j);
"""
# Of one request in int8: two chains a tile, whose sum is left to what follows.
_NARROW_PRODUCTS = """    const uint32_t seed = product_seed(cta, pass, 0);
#pragma unroll
    for (int i = 0; i < 4 * kTurns; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i / 4][i / 2 % 2][i % 2][j] = product(seed, i * 4 + j);
#pragma unroll
    for (int j = 0; j < 4; ++j) alone[j] = product(seed, 16 * kTurns + j);
"""

_WARPGROUP_PRODUCTS = """    if (k > 0) return;
    const uint32_t seed = product_seed(cta, pass, slot);
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[group][j] = product(seed, group * 4 + j);
"""

# Of each CTA's requests one row, of the last CTA the best. Scores are far apart: none is contested. The first lane of a
# request wins.
_BEST_ROW = """
template <int kGroups>
__device__ __forceinline__ void add_best_row(
    const WalkParams& p, const Cta& cta, const Pass& pass, LaneRequests<kGroups>& mine) {
    if (cta.warp > 0) return;
#pragma unroll
    for (int at = 0; at < kGroups; ++at)
#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which) {
            const uint32_t mixed = pass.step * 64 + pass.first_row + mine.request(cta, at, which);
            const int row = __umulhi(mixed * 0x9e3779b1u, cta.rows) & ~1;
            const float value = p.rank * 256 + cta.index - (cta.lane >> 2) * 2000;
#if TPW_SAMPLED || TPW_ROUNDING == 2
            const int32_t candidates[2] = {ordered(value), ordered(value - 1000.0f)};
            mine.best[at][which].merge(Best::of<2>(candidates, row));
#else
            mine.best[at][which].add_pair(pack_bf16(value, value - 1000.0f), row, cta);
#endif
        }
}

"""
_KEEP_PRODUCTS = """        uint32_t mixed = 0;
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
            for (int group = 0; group < kGroups; ++group)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if constexpr (TPW_INT8)
                        mixed ^= static_cast<uint32_t>(acc[i][group][j]);
                    else
                        mixed ^= __float_as_uint(acc[i][group][j]);
                }
        keep(s, mixed);
        return;
"""
# In place of the call, where one request's tiles in int8 are added all at once.
_KEEP_NARROW_PRODUCTS = """        uint32_t mixed = 0;
#pragma unroll
        for (int i = 0; i < 2 * kTurns + kSlots % 2; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) mixed ^= static_cast<uint32_t>(of_rows[i][j]);
        keep(s, mixed);
"""

_KNOWN_WORD = """    // What all CTAs take for the winner of a row's step.
    __device__ __forceinline__ u64 known_word(int step, int row) const {
        const uint32_t id = __umulhi((step * 64 + row + 1) * 0x9e3779b1u, static_cast<uint32_t>(p.vocab_size));
        return kCandidates ? make_candidate(ordered(1.0f), id, 0x3f80) : make_key(ordered(1.0f), id);
    }

"""
# In the kernel a token's row of W1 is fetched into L2 while the exchange goes on.
_PREFETCH_KNOWN = """        const int warps = cta.count * kServiceWarps;
        for (int i = cta.index * kServiceWarps + warp; i < cta.batch * p.gamma; i += warps)
            prefetch_u(known_word(i / cta.batch, i % cta.batch), lane);
"""

_LOAD_U = r"\b(u|u\[i\])\.load\(u_row\([^\n]*\n"
_KNOWN_U = r"""{
#pragma unroll
                    for (int v = 0; v < URow::kVectors; ++v) {
                        const uint32_t word = 0x3d003d00u | ((previous * 0x9e3779b1u + lane + v) & 0x00ff00ffu);
                        \g<1>.words[v] = make_uint4(word, word ^ 0x10001u, word ^ 0x20002u, word ^ 0x40004u);
                    }
                    \g<1>.scale = __uint_as_float(0x38000000u | (previous & 0xffu));
                }
"""

# As noise does, they keep scores apart that would often be equal: a logit has 8 bits.
_KNOWN_NOISE = """
__device__ __forceinline__ float4 known_noise(uint32_t id) {
    const float first = __uint_as_float(0x3f800000u | id * 0x9e3779b1u >> 9);
    return make_float4(first, first + 0.25f, first + 0.5f, first + 0.75f);
}

"""
_KNOWN_PAIRS = """#pragma unroll
        for (int i = 0; i < kPairs * Dot::kLaneRequests; ++i)
            pairs[i / Dot::kLaneRequests].noise[i % Dot::kLaneRequests] =
                known_noise(p.shard_start + cta.first_row + pairs[i / Dot::kLaneRequests].row);
        return;
"""
_KNOWN_TILE = """#pragma unroll
        for (int which = 0; which < Dot::kLaneRequests; ++which)
            rows.noise[which] = known_noise(p.shard_start + cta.first_row + rows.row);
        return;
"""

# Registers that hold a zero each, which only the run knows; and one tile of shared memory, which all read.
_ZEROS = """
__device__ __forceinline__ Fragment zeros(const Smem& s, const Cta& cta) {
    Fragment f;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.x), "=r"(f.y), "=r"(f.z), "=r"(f.w)
                 : "r"(shared_address(reinterpret_cast<uint4*>(s.best) + cta.warp)) : "memory");
    return f;
}

"""
_ZERO_REGISTERS = """    if (cta.lane == 0) reinterpret_cast<uint4*>(s.best)[cta.warp] = make_uint4(0, 0, 0, 0);
    __syncwarp();
"""
_ZERO_TILE = """        if (kSmemTiles > 0)
            for (int i = thread; i < kTileBytes / 16; i += kServiceThreads)
                reinterpret_cast<uint4*>(s.weights)[i] = make_uint4(0, 0, 0, 0);
"""

# The last one includes all others.
_LANES, _NARROW, _WARPGROUP, _MULTIPLY = (
    "lane_requests.cuh",
    "multiply_narrow.cuh",
    "multiply_warpgroup.cuh",
    "multiply.cuh",
)
_BEGIN = r"\nnamespace tpw \{\n"  # of a file's code

# The dot products of a chunk by themselves know neither.
_KNOW_THE_PASS = (
    Edit(_MULTIPLY, r"void dot_products\(", r"\g<0>const WalkParams& p, const Pass& pass, "),
    Edit(_MULTIPLY, r"dot_products<[^>]*>\(", r"\g<0>p, pass, "),
    Edit(_WARPGROUP, r"void start_(?:product|round)\(", r"\g<0>const Pass& pass, "),
    Edit(_WARPGROUP, r" start_(?:product|round)\((?=s, )", r"\g<0>pass, "),
)

PRODUCTS, ROWS, EXCHANGE, U, NOISE, W2, STEPS = (
    "no dot products",
    "no base logits, rounding, best row",
    "no exchange",
    "no fetch of u",
    "no noise",
    "no load of W2",
    "no steps",
)
LEFT_OUT: dict[str, tuple[Edit, ...]] = {
    PRODUCTS: (
        *_KNOW_THE_PASS,
        Edit(_LANES, _BEGIN, r"\g<0>" + _KEEP + _PRODUCT),
        Edit(
            _MULTIPLY,
            r"    // What k step `k` needs(?s:.*?)        __syncwarp\(\);\n    \}\n",
            _PRODUCTS.format(slot="first * 64 + shared_slot", tiles="kTiles", groups="kGroups"),
        ),
        Edit(
            _MULTIPLY,
            r"#pragma unroll\n            for \(int k = 0; k < kChunkSteps; \+\+k\)(?s:.*?);\n",
            "if (part == 0) {\n" + _PRODUCTS.format(slot="slot", tiles="1", groups="kColumnGroups") + "}\n",
        ),
        Edit(
            _NARROW,
            r"#pragma unroll\n    for \(int k = 0; [^\n]*\n        const Operands now = ahead;\n(?s:.*?)\n    \}\n",
            _NARROW_PRODUCTS,
        ),
        Edit(_WARPGROUP, r"    u \+= k \* (?s:.*?)\n    \}\n(?=\})", _WARPGROUP_PRODUCTS),
        Edit("walk.cu", _FIRST_WAIT, r"\g<0>        if (index == 0) keep(s, weights);" + "\n"),
    ),
    ROWS: (
        Edit(_LANES, _BEGIN, r"\g<0>" + _KEEP),
        Edit(_LANES, r"void add_tiles\([^{]*\{\n", r"\g<0>" + _KEEP_PRODUCTS),
        Edit(_NARROW, r" +mine\.add_all<kTurns, [^\n]*\n", _KEEP_NARROW_PRODUCTS),
        Edit(_MULTIPLY, _BEGIN, r"\g<0>" + _BEST_ROW),
        Edit(_MULTIPLY, r"mine\.leave\(", r"add_best_row(p, cta, pass, mine), \g<0>"),
    ),
    EXCHANGE: (
        Edit("walk.cu", r" +__device__ [^\n]*void receive\(const Pass& pass, bool alive\)", _KNOWN_WORD + r"\g<0>"),
        Edit(
            "walk.cu",
            r"if \(alive && !exchange\.collect<.*?\)\) fail\(\);",
            "if (alive && warp == 0) key = known_word(pass.step, 0);",
        ),
        Edit(
            "walk.cu",
            r"if \(!exchange\.receive\(.*?\)\) return fail\(\);",
            "if (active && lane % kAgreeingRanks == 0) key = known_word(pass.step, row);",
        ),
        Edit(
            "walk.cu",
            r"if \(!exchange\.aggregate\(.*?\)\) return fail\(\);",
            "best = known_word(pass.step, row);",
        ),
        Edit("walk.cu", r" +exchange\.prefetch\([^\n]*\n", r"\g<0>" + _PREFETCH_KNOWN),
    ),
    U: (
        Edit("walk.cu", _LOAD_U, _KNOWN_U),
        Edit("walk.cu", r"void prefetch_u\([^)]*\) const \{\n", r"\g<0>        return;" + "\n"),
    ),
    NOISE: (
        Edit("cta.cuh", r"void draw_noise\([^)]*\) \{\n", r"\g<0>    return;" + "\n"),
        Edit(_LANES, _BEGIN, r"\g<0>" + _KNOWN_NOISE),
        Edit(_LANES, r"void draw\([^{]*LaneRows<2>\* pairs\) const \{\n", r"\g<0>" + _KNOWN_PAIRS),
        Edit(
            _LANES,
            r"void draw\([^{]*LaneRows<1>\* tile\) const \{\n        LaneRows<1>& rows = \*tile;\n",
            r"\g<0>" + _KNOWN_TILE,
        ),
    ),
    W2: (
        *_KNOW_THE_PASS,
        Edit(_LANES, _BEGIN, r"\g<0>" + _ZEROS),
        Edit("walk.cu", r"    Fragment weights\[kRegTiles\]\[kSteps\];\n", r"\g<0>" + _ZERO_REGISTERS),
        Edit("walk.cu", r"load_weights\(cta_weights [^;]*;", "zeros(s, cta);"),
        Edit(_WARPGROUP, r"a\[i\] = load_weights\([^;]*;", "a[i] = make_uint4(0, 0, 0, 0);"),
        Edit("walk.cu", r"(const int tiles = )has_passes\(p, cta, first_step\) \? kSmemTiles : 0;", r"\g<1>0;"),
        Edit("walk.cu", r" +load_rows\(p, s, cta, [^\n]*\n", r"\g<0>" + _ZERO_TILE),
        Edit(_MULTIPLY, r"s\.weights \+ \(shared_slot \* kMultiplyWarps \+ cta\.warp\) \* kTileBytes", "s.weights"),
        # A factor that is 0 and that the compiler doesn't know, or one load would serve several tiles.
        Edit(_MULTIPLY, r"\(i - kReg\) \* kMultiplyWarps \* kSteps", "(i - kReg) * (p.shares - 1)"),
        # The same of one request in int8.
        Edit(_NARROW, r"s\.weights \+ cta\.warp \* kTileBytes", "s.weights"),
        Edit(_NARROW, r"\(i \* kMultiplyWarps \* kSteps \+ k\)", "(i * (p.shares - 1) + k)"),
    ),
    STEPS: (
        Edit(_LANES, _BEGIN, r"\g<0>" + _KEEP),
        Edit(
            "walk.cu",
            r"    if \(kStreams && [^\n]*stream\.start\(\);\n",
            "    mbarrier_wait(&s.control->weights_arrived, 0);\n    keep(s, weights);\n    return;\n" + r"\g<0>",
        ),
        Edit("walk.cu", r"index < min\(2, passes\.count\)", "index < 0"),
        Edit("walk.cu", r" +for \(int index = 0; index < min\(lead\(\), passes\.count\); [^\n]*\n", ""),
        Edit(
            "walk.cu",
            r" +exchange\.prefetch\([^\n]*\n",
            "        if (cta.index == 0) finish();\n        return;\n" + r"\g<0>",
        ),
        Edit("walk.cu", r" +for \(int index = kPosts \? passes\.count : [^\n]*\n", ""),
    ),
}


def edited(name: str, folder: Path) -> Path:
    """Writes the variant's sources into `folder` and returns it.

    Raises:
        ValueError: an edit's pattern isn't in its file; the sources have changed, the edit must follow.
    """
    texts = {path.name: path.read_text() for path in jit.csrc_dir().iterdir() if path.is_file()}
    for edit in {**VARIANTS, **BROKEN, **LEFT_OUT}[name]:
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


def jobs(
    names: Sequence[str], vocab_size: int, world: int, plans: Sequence[str], target: Target, reports: bool = True
) -> list[VariantJob]:
    """What runtimes of `world` ranks that hold these plans want of each variant. reports: logits, too; a runtime must
    be made `without_reports` where that isn't so.
    """
    other_plans = tuple(f"{plan} " for plan in PLAN_NAMES if plan not in plans)
    return [
        VariantJob(job.purpose, job.source, job.entry, job.macros, name)
        for name in names
        for job in precompile.jobs(vocab_size, 256, [world], 64, ["engine"], target)
        if not job.purpose.startswith(other_plans) and (reports or not dict(job.macros).get("TPW_LOGITS"))
    ]


def without_reports() -> AbstractContextManager[object]:
    """Runtimes made meanwhile hold only kernels of walks without logits and log-sum-exps: others can't be walked."""

    def those_without(**arguments: Any) -> list[Specialisation]:
        return [one for one in kernels.specialisations(**arguments) if one.logits == "none"]

    return mock.patch.object(executors, "specialisations", those_without)
