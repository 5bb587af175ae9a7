"""A launch's parameters lie where the device looks for them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from ptx_access import compile_to_ptx

from tp_walk import jit, kernels
from tp_walk.precompile import HOPPER

FIELDS = [name for name, *_ in kernels.WalkParams._fields_]


def test_every_field_has_the_hosts_offset(tmp_path: Path) -> None:
    folder = tmp_path / "csrc"
    shutil.copytree(jit.csrc_dir(), folder)
    stores = "\n".join(f"out[{i}] = reinterpret_cast<uint64_t>(&p->{name});" for i, name in enumerate(FIELDS))
    (folder / "offsets.cu").write_text(f"""
        #include "walk_params.cuh"
        using namespace tpw;
        extern "C" __global__ void offsets(volatile uint64_t* out) {{
            const WalkParams* p = nullptr;
            {stores}
        }}
    """)
    (one, *_) = kernels.specialisations(
        int8=False,
        markov_rank=256,
        rows=64,
        world_size=1,
        max_batch=4,
        rounding="engine",
        num_sms=HOPPER.num_sms,
        shared_limit=HOPPER.shared_limit,
    )
    ptx = compile_to_ptx(folder, "offsets.cu", one.macros)
    constants = dict(re.findall(r"mov\.b?u?64\s+(%rd\d+), (\d+);", ptx))
    stored = re.findall(r"st\.volatile\.global\.[bu]64\s+\[%rd\d+(?:\+(\d+))?\], (\S+);", ptx)
    offsets = {FIELDS[int(at or 0) // 8]: int(constants.get(value, value)) for at, value in stored}
    assert offsets == {name: getattr(kernels.WalkParams, name).offset for name in FIELDS}
