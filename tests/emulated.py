"""Kernels of csrc run on the CPU: their very sources, compiled by g++ against emulator/emulate.h, on small grids.

For what a GPU isn't needed for: that indices, exchange, barriers and arithmetic are right. Weights whose dots are exact
in any order give the definition's tokens to the bit.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tp_walk import jit

SOURCES = Path(__file__).parent / "emulator"
LIMIT_S = 120.0
HAS_COMPILER = shutil.which("g++") is not None

# What a statement of inline assembly is replaced by, found by an instruction in it; the names are those around it.
INSTRUCTIONS = {
    "cvt.rn.bf16x2.f32": "packed = emulate_bf16x2(high, low);",
    "lg2.approx": "log2 = emulate_log2(x);",
    "ex2.approx": "power = emulate_exp2(x);",
    "rcp.approx.ftz.f64": "reciprocal = 1.0 / denominator;",
    "add.rn.bf16x2": "sum = emulate_add_bf16x2(x, y);",
    "prmt.b32": "signs = (sum >> 15 & 0x10001u) * 0xffffu;",
    "set.gt.u32.bf16x2": "mask = emulate_above_bf16x2(x, y);",
    "max.bf16x2": "larger = emulate_max_bf16x2(x, y);",
    "min.bf16x2": "smaller = emulate_min_bf16x2(x, y);",
    "wgmma.mma_async": "emulate_wgmma(acc, a, b, adds);",
    "wgmma.commit": "emulate_wgmma_commit();",
    "wgmma.wait": "emulate_wgmma_wait(kPending);",
    "mma.sync.aligned.m16n8k16": "emulate_mma(acc, a, b);",
    "mma.sync.aligned.m16n8k32": "emulate_mma(acc, a, b);",
    "@wanted": "if (wanted) emulate_load_word(at, word);",
    ".sys.global.b128 [%0]": "emulate_store_word(at, key, tag);",
    ".gpu.global.b128 [%0]": "emulate_store_word(at, key, tag);",
    ".global.b128 word": "emulate_load_word(at, word);",
    "ld.relaxed.gpu.global.u64": "value = *reinterpret_cast<const u64*>(mailbox + offset);",
    "st.relaxed.gpu.global.u64": "*reinterpret_cast<u64*>(mailbox + offset) = value;",
    "st.relaxed.sys.global.u32": "*reinterpret_cast<u32*>(status + offset) = value;",
    "st.relaxed.sys.global.u64": "*reinterpret_cast<u64*>(status + offset) = value;",
    "st.release.sys.global.u32": "*reinterpret_cast<u32*>(status + TPW_STATUS_CODE_OFFSET) = code;",
    "%globaltimer": "ns = emulate_ns();",
    "ld.global.nc": "f = *address;",
    "cp.async.cg": "std::memcpy(target, source, 16);",
    "mbarrier.init": "emulate_mbarrier_init(barrier, arrivals);",
    "mbarrier.arrive.expect_tx": "emulate_mbarrier_expect(barrier, bytes);",
    "mbarrier.arrive.shared": "emulate_mbarrier_arrive(barrier);",
    "cp.async.bulk.shared": "emulate_bulk_load(target, source, bytes, barrier);",
    "cp.async.bulk.global": "emulate_bulk_store(target, source, bytes);",
    "cp.async.bulk.wait": "emulate_await_bulk_stores();",
    "mbarrier.try_wait": "emulate_mbarrier_wait(barrier, parity);",
    "bar.sync": "emulate_named_barrier(id, threads);",
    "bar.arrive": "emulate_named_barrier_arrive(id, threads);",
    # Of experiments/kernel_variants.py.
    "st.shared.u32": "s.rows[0].unused = mixed;",
    "ld.volatile.shared": "f = reinterpret_cast<uint4*>(s.best)[cta.warp];",
}
# And those that nothing stands for here: hints and fences.
NOTHING = (
    "prefetch",
    "cp.async.commit",
    "cp.async.wait",
    "cp.async.bulk.commit",
    "setmaxnreg",
    "fence.",
    '(""',
)
_ASSEMBLY = re.compile(r'asm\s*(?:volatile)?\s*\((?:[^()"]|"[^"]*"|\((?:[^()"]|\((?:[^()]|\([^()]*\))*\))*\))*\)\s*;')


def translated(source: str) -> str:
    """A file of csrc as g++ takes it."""

    def replace(match: re.Match[str]) -> str:
        known = [to for instruction, to in INSTRUCTIONS.items() if instruction in match[0]]
        assert known or any(hint in match[0] for hint in NOTHING), f"the emulator doesn't know {match[0]}"
        return known[0] if known else ";"

    source = _ASSEMBLY.sub(replace, source)
    source = re.sub(r"extern __shared__ .*? (\w+)\[\];", r"unsigned char* \1 = emulate_shared();", source)
    # Of 64 bits there are two integer types here, and csrc means the other one than the standard library.
    source = re.sub(r"using (?:int|uint)(?:8|16|32)_t = .*;", "", source)
    return re.sub(r"\b(u?)int64_t\b", r"\1nvrtc_int64", source)


# Fortified, longjmp to another stack would be taken for a mistake.
OPTIONS = ("-std=c++20", "-O1", "-w", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")


def _compile(*arguments: str) -> None:
    done = subprocess.run(["g++", *OPTIONS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


@cache
def _sources(folder: Path) -> None:
    """All that is compiled, and emulate.h compiled already: half of what a library takes."""
    folder.mkdir(parents=True)
    for file in [
        *jit.csrc_dir().glob("*.cuh"),
        *(jit.csrc_dir() / f"{path.stem}.cu" for path in SOURCES.glob("*.cpp")),
    ]:
        (folder / file.name).write_text(translated(file.read_text()))
    for file in SOURCES.iterdir():
        shutil.copy(file, folder)
    _compile("-x", "c++-header", str(folder / "emulate.h"), "-o", str(folder / "emulate.h.gch"))


@cache
def _library(kernel: str, macros: tuple[tuple[str, int], ...], folder: Path) -> ctypes.CDLL:
    _sources(folder / "csrc")
    name = hashlib.sha256(repr((kernel, macros)).encode()).hexdigest()[:16]
    library = folder / f"{name}.so"
    defines = (f"-D{macro}={value}" for macro, value in macros)
    _compile(*defines, str(folder / "csrc" / f"{kernel}.cpp"), "-o", str(library))
    return ctypes.CDLL(str(library))


def launch(
    kernel: str, macros: Mapping[str, int], arguments: Sequence[int], grid: int, shared_bytes: int, folder: Path
) -> None:
    """Launches `kernel` on every rank, arguments[rank] being the address of what it is given, and waits for all.

    folder: where its sources and library are kept, for as long as the process lives.
    """
    library = _library(kernel, tuple(sorted(macros.items())), folder)
    library.emulate.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_size_t, ctypes.c_double]
    addresses = (ctypes.c_void_p * len(arguments))(*arguments)
    assert library.emulate(addresses, len(arguments), grid, shared_bytes, LIMIT_S) == 0, f"{kernel} doesn't end"


def run_kernel(
    kernel: str,
    macros: Mapping[str, int],
    params: Sequence[ctypes.Structure],
    grid: int,
    shared_bytes: int,
    folder: Path,
) -> None:
    """`launch` of a kernel that is given one structure."""
    launch(kernel, macros, [ctypes.addressof(one) for one in params], grid, shared_bytes, folder)
