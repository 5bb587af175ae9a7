"""A launch's parameters lie where the device looks for them."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import pytest
import torch
from ptx_access import compile_to_ptx

from tp_walk import certified, jit, kernels, spread
from tp_walk.executors import base_is_aligned, point_at_base


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("width", "first", "aligned"),
    [(16, 0, True), (16, 4, True), (16, 1, False), (16, 2, False), (18, 0, False), (16, 16, True)],
    ids=["whole", "a shard", "odd", "half", "stride", "an empty shard"],
)
def test_base_logits_are_aligned_in_all_rows_or_not(dtype: torch.dtype, width: int, first: int, aligned: bool) -> None:
    base, p = torch.zeros(2, 3, width, dtype=dtype)[..., first:], kernels.WalkParams()
    assert base.numel() > 0 or base.data_ptr() == 0
    point_at_base(p, base, False)
    assert base_is_aligned(p, base.element_size()) == aligned
