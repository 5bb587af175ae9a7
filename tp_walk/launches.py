"""Launches of kernels whose CTAs wait for each other."""

from __future__ import annotations

from tp_walk import jit
from tp_walk.errors import KernelError, PlanUnavailableError


class Launch:
    """A kernel, loaded, with its launch configuration filled in once.

    Args:
        what: the launch in words, for messages.
        grid: CTAs, which must all fit on the GPU's `num_sms` SMs at once. threads: of a CTA.
        shared_bytes: dynamic shared memory of a CTA.

    Raises:
        PlanUnavailableError: they don't fit. KernelError: the kernel can't be loaded.
    """

    def __init__(
        self, what: str, kernel: jit.CompiledKernel, *, grid: int, threads: int, num_sms: int, shared_bytes: int = 0
    ) -> None:
        from cuda.bindings import driver

        self._what = what
        self._driver = driver
        self._function = kernel.load(shared_bytes)
        status, ctas = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared_bytes)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"the occupancy of {what} isn't known: {status.name}")
        if grid > ctas * num_sms:
            raise PlanUnavailableError(
                f"the {grid} CTAs of {what} wait for each other, and this GPU holds only {ctas * num_sms} of them at "
                f"once: {num_sms} SMs, {kernel.resources.registers} registers a thread and {shared_bytes} bytes of "
                "shared memory a CTA"
            )
        cooperative = driver.CUlaunchAttribute()
        cooperative.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        # Cooperative: a grid that can't be co-resident is refused instead of waiting for CTAs that never start.
        config.attrs = [cooperative]
        config.numAttrs = 1
        self._config = config

    def __call__(self, arguments: int, stream: int) -> None:
        """arguments: address of an array of the arguments' addresses, as of cuLaunchKernelEx. stream: its handle."""
        self._config.hStream = stream
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, arguments, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(
                f"launching {self._what} ({self._config.gridDimX} CTAs, {self._config.sharedMemBytes} bytes of shared "
                f"memory each) failed: {status.name}"
            )
