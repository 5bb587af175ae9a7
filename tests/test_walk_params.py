"""A launch's parameters lie where the device looks for them."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest
from ptx_access import compile_to_ptx

from tp_walk import certified, jit, kernels
from tp_walk.precompile import HOPPER

STRUCTS = [
    (kernels.WalkParams, "WalkParams", "walk_params.cuh"),
    (certified.CertifyParams, "CertifyParams", "certify_params.cuh"),
]


@pytest.mark.parametrize(("struct", "name", "header"), STRUCTS)
def test_every_field_has_the_hosts_offset(
    tmp_path: Path, struct: type[ctypes.Structure], name: str, header: str
) -> None:
    fields = [field for field, *_ in struct._fields_]
    folder = tmp_path / "csrc"
    shutil.copytree(jit.csrc_dir(), folder)
    stores = "\n".join(f"out[{i}] = reinterpret_cast<uint64_t>(&p->{field});" for i, field in enumerate(fields))
    (folder / "offsets.cu").write_text(f"""
        #include "{header}"
        using namespace tpw;
        extern "C" __global__ void offsets(volatile uint64_t* out) {{
            const {name}* p = nullptr;
            {stores}
        }}
    """)
    (one, *_) = certified.certify_specialisations(
        markov_rank=256,
        widths=[64],
        max_batch=4,
        rounding="engine",
        num_sms=HOPPER.num_sms,
        shared_limit=HOPPER.shared_limit,
    )
    ptx = compile_to_ptx(folder, "offsets.cu", one.macros)
    constants = dict(re.findall(r"mov\.b?u?64\s+(%rd\d+), (\d+);", ptx))
    stored = re.findall(r"st\.volatile\.global\.[bu]64\s+\[%rd\d+(?:\+(\d+))?\], (\S+);", ptx)
    offsets = {fields[int(at or 0) // 8]: int(constants.get(value, value)) for at, value in stored}
    assert offsets == {field: getattr(struct, field).offset for field in fields}
