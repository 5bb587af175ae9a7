"""Device code of csrc, compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tp_walk import jit

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a host compiler")


def build(
    folder: Path,
    harness: str,
    macros: Mapping[str, int],
    options: Sequence[str] = (),
    replaced: Mapping[str, Mapping[str, str]] | None = None,
) -> ctypes.CDLL:
    """A library of `harness`, which includes files of csrc and declares of CUDA what they use.

    replaced: by file of csrc, passages and what takes their places: instructions of the GPU.
    """
    sources = shutil.copytree(jit.csrc_dir(), folder / "csrc")
    for file, passages in (replaced or {}).items():
        text = (sources / file).read_text()
        for passage, host in passages.items():
            assert passage in text, f"{file} doesn't hold {passage!r} any more"
            text = text.replace(passage, host)
        (sources / file).write_text(text)
    (folder / "harness.cpp").write_text(harness)
    library = folder / "harness.so"
    common = ["-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", f"-I{sources}"]
    common += [
        "-D__device__=",
        "-D__forceinline__=inline",
        "-D__noinline__=",
        *(f"-D{name}={value}" for name, value in macros.items()),
    ]
    subprocess.run(["g++", *common, *options, str(folder / "harness.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
