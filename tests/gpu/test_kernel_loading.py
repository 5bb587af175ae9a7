"""Loading a kernel: what only a GPU can show."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from walk_lab import SMALL

from tp_walk import jit, kernels
from tp_walk.errors import KernelError, PlanUnavailableError
from tp_walk.launches import Launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Writes the CTA's dynamic shared memory once over, so that a launch without it faults.
SOURCE = """
extern "C" __global__ void fill(int* out, int words) {
  extern __shared__ int shared[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = i;
  __syncthreads();
  if (threadIdx.x == 0) out[0] = shared[words - 1] + VALUE;
}
"""


@pytest.fixture
def fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jit.CompiledKernel:
    torch.cuda.init()
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    (tmp_path / "fill.cu").write_text(SOURCE)
    monkeypatch.setattr(jit, "csrc_dir", lambda: tmp_path)
    monkeypatch.setenv("TP_WALK_CACHE_DIR", str(tmp_path / "cache"))
    return jit.compile_kernel("fill.cu", "fill", {"VALUE": 1000})


def optin_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).shared_memory_per_block_optin)


def test_a_loaded_kernel_runs_with_all_of_shared_memory(fill: jit.CompiledKernel) -> None:
    from cuda.bindings import driver

    shared_bytes = optin_bytes()
    function = fill.load(shared_bytes)
    status, is_loaded = driver.cuFuncIsLoaded(function)
    assert (status, is_loaded) == (
        driver.CUresult.CUDA_SUCCESS,
        driver.CUfunctionLoadingState.CU_FUNCTION_LOADING_STATE_LOADED,
    )
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    arguments = ((out.data_ptr(), shared_bytes // 4), (ctypes.c_void_p, ctypes.c_int))
    stream = torch.cuda.current_stream().cuda_stream
    (status,) = driver.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, shared_bytes, stream, arguments, 0)
    assert status == driver.CUresult.CUDA_SUCCESS
    assert out.item() == shared_bytes // 4 - 1 + 1000


def test_loading_again_gives_the_same_function(fill: jit.CompiledKernel) -> None:
    assert int(fill.load(4096)) == int(fill.load(4096))


def test_more_shared_memory_than_there_is_is_refused_with_the_sizes(fill: jit.CompiledKernel) -> None:
    too_much = optin_bytes() + 1024
    with pytest.raises(KernelError, match=f"fill .*{too_much} bytes of shared memory"):
        fill.load(too_much)


def test_the_driver_counts_registers_as_the_cubin_does(fill: jit.CompiledKernel) -> None:
    from cuda.bindings import driver

    function = fill.load()
    attribute = driver.CUfunction_attribute
    for name, expected in (
        (attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, fill.resources.registers),
        (attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, fill.resources.stack_bytes),
    ):
        status, value = driver.cuFuncGetAttribute(name, function)
        assert (status, value) == (driver.CUresult.CUDA_SUCCESS, expected)


# ---- grids that can't be co-resident ---------------------------------------------------------------------------------


def sms() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def crowded_walk(num_sms: int) -> Launch:
    """A walk with ten CTAs an SM, of which there is room for one, on a GPU that is said to have `num_sms`."""
    torch.cuda.set_device(0)
    (one, *_) = kernels.specialisations(
        int8=True,
        markov_rank=256,
        rows=SMALL,
        world_size=1,
        max_batch=4,
        rounding="engine",
        num_sms=sms(),
        shared_limit=optin_bytes(),
    )
    kernel = jit.compile_kernel("walk.cu", "walk", one.macros)
    shared_bytes = one.placement.shared_bytes
    return Launch("walks", kernel, grid=10 * sms(), threads=kernels.THREADS, num_sms=num_sms, shared_bytes=shared_bytes)


def test_a_grid_that_cannot_be_co_resident_is_refused_at_set_up() -> None:
    with pytest.raises(
        PlanUnavailableError, match=f"{10 * sms()} CTAs of walks wait for each other, .* holds only {sms()} "
    ):
        crowded_walk(sms())


def test_its_launch_is_refused_too() -> None:
    launch = crowded_walk(10 * sms())
    params = kernels.WalkParams()
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    with pytest.raises(KernelError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        launch(ctypes.addressof(arguments), torch.cuda.current_stream().cuda_stream)
    assert torch.ones(3, device="cuda").sum().item() == 3.0, "the context lives on"
