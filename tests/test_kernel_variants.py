"""The builds for experiments: every edit still finds its passage, and what comes out compiles."""

from __future__ import annotations

from pathlib import Path

import kernel_variants
import pytest
from kernel_variants import BROKEN, VARIANTS, Edit
from ptx_access import compile_to_ptx

from tp_walk import jit, kernels
from tp_walk.precompile import HOPPER


def macros() -> dict[str, int]:
    (first, *_) = kernels.specialisations(
        int8=False,
        markov_rank=256,
        rows=1000,
        world_size=2,
        max_batch=64,
        rounding="engine",
        num_sms=HOPPER.num_sms,
        shared_limit=HOPPER.shared_limit,
    )
    return first.macros


@pytest.mark.parametrize("name", [*VARIANTS, *BROKEN])
def test_a_variant_compiles_and_is_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "csrc_dir", jit.csrc_dir)  # put back afterwards
    production = jit.source_hash()
    kernel_variants.use(name)
    assert (jit.source_hash() == production) == (name == "production")
    jit.compile_source('#include "exchange.cuh"\n', "variant.cu", macros(), HOPPER.arch)
    if name == "delays":  # the one edit of walk.cu, which takes longer
        compile_to_ptx(jit.csrc_dir(), "walk.cu", macros())
    kernel_variants.use("production")
    assert jit.source_hash() == production


def test_an_edit_without_its_passage_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VARIANTS, "outdated", (Edit("mailbox.cuh", "a passage that was there once", ""),))
    with pytest.raises(ValueError, match=r"variant 'outdated': mailbox\.cuh doesn't hold"):
        kernel_variants.edited("outdated", tmp_path)
