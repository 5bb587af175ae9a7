"""A launch's parameters lie where the device looks for them."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest
from ptx_access import compile_to_ptx

from tp_walk import certified, jit, kernels, spread


@pytest.mark.parametrize(
    ("host", "name", "header"),
    [
        (kernels.WalkParams, "WalkParams", "walk_params.cuh"),
        (spread.SpreadParams, "SpreadParams", "copy_rows.cuh"),
        (certified.CertifyParams, "CertifyParams", "certify_params.cuh"),
    ],
    ids=["walk", "spread", "certify"],
)
def test_every_field_has_the_hosts_offset(tmp_path: Path, host: type[ctypes.Structure], name: str, header: str) -> None:
    fields = [field for field, *_ in host._fields_]
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
    macros = spread.spread_macros(2, 64, base_fp32=False)  # those of the walk's sizes among them
    macros["TPW_CERTIFY_PARAMS_BYTES"] = ctypes.sizeof(certified.CertifyParams)
    ptx = compile_to_ptx(folder, "offsets.cu", macros)
    constants = dict(re.findall(r"mov\.b?u?64\s+(%rd\d+), (\d+);", ptx))
    stored = re.findall(r"st\.volatile\.global\.[bu]64\s+\[%rd\d+(?:\+(\d+))?\], (\S+);", ptx)
    offsets = {fields[int(at or 0) // 8]: int(constants.get(value, value)) for at, value in stored}
    assert offsets == {field: getattr(host, field).offset for field in fields}
