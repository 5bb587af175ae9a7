"""csrc → cubin by NVRTC, kept on disk, loaded before first use.

`compile_kernel` needs no GPU. A cubin on disk is named by a hash of everything that it depends on: all of csrc, the
macros, the architecture, the compiler's options and NVRTC's version. Ranks that start together may all compile the
same one: each writes a file of its own and renames it, and whoever comes last wins with equal bytes. The cache is never
trusted: an entry that doesn't match its own checksum is compiled again; where it can't be written, the cubin lives in
memory alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tp_walk.config import settings
from tp_walk.cubin import ResourceUsage, resource_usage
from tp_walk.errors import KernelError, PlanUnavailableError
from tp_walk.files import write_whole

logger = logging.getLogger(__name__)

DEFAULT_ARCH = "sm_90a"

# The definition's bits: every fp32 operation rounds on its own, nothing is flushed, division is IEEE's.
COMPILER_OPTIONS: Mapping[str, Any] = {"std": "c++17", "fma": False, "ftz": False, "prec_div": True, "prec_sqrt": True}

_CHECKSUM_BYTES = 32

_cubins: dict[str, bytes] = {}
# Never unloaded: a captured graph may still hold a function after the runtime that loaded it is closed.
_functions: dict[tuple[int, bytes, str, int], Any] = {}


@dataclass(frozen=True)
class CompiledKernel:
    """One entry point of a cubin; `resources` says what it takes of an SM, without a GPU."""

    entry: str
    arch: str
    cubin: bytes

    @cached_property
    def resources(self) -> ResourceUsage:
        return resource_usage(self.cubin)[self.entry]

    def load(self, dynamic_shared_bytes: int = 0) -> Any:
        """Loads the kernel into the current CUDA context, now rather than at its first launch.

        A launch that first has to load its code can wait for ever beside a kernel that spins for it. Loading the same
        kernel again returns the same function.

        Args:
            dynamic_shared_bytes: the most dynamic shared memory that a launch of this function may ask for.

        Returns:
            The `cuda.bindings.driver.CUfunction`, for `cuLaunchKernelEx`; `int()` of it is the handle.

        Raises:
            KernelError: there is no current context, or the driver refuses the cubin or the shared memory.
        """
        from cuda.bindings import driver

        def call(what: str, *arguments: Any) -> Any:
            status, *values = getattr(driver, what)(*arguments)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise KernelError(
                    f"{what} of {self.entry} ({self.arch}, {self.resources.static_shared_bytes} + "
                    f"{dynamic_shared_bytes} bytes of shared memory) failed: {status.name}"
                )
            return values[0] if values else None

        context = int(call("cuCtxGetCurrent"))
        if context == 0:
            raise KernelError(
                f"{self.entry} can't be loaded: no current CUDA context; call torch.cuda.set_device first"
            )
        key = (context, hashlib.sha256(self.cubin).digest(), self.entry, dynamic_shared_bytes)
        if key not in _functions:
            library = call("cuLibraryLoadData", self.cubin, [], [], 0, [], [], 0)
            function = call("cuKernelGetFunction", call("cuLibraryGetKernel", library, self.entry.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", function, attribute, dynamic_shared_bytes)
            call("cuFuncLoad", function)
            _functions[key] = function
        return _functions[key]


def csrc_dir() -> Path:
    """The device sources: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "csrc", package.parent / "csrc"):
        if folder.is_dir():
            return folder
    raise KernelError(f"no device sources: {package / 'csrc'} is missing; install tp_walk again")


def default_arch() -> str:
    """The current GPU's architecture, `sm_90a` style; Hopper's where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return DEFAULT_ARCH
    major, minor = torch.cuda.get_device_capability()
    # The matrix instructions of one generation alone exist only under the name with the letter.
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def nvrtc_version() -> tuple[int, int]:
    """Of the NVRTC that compiles here.

    Raises:
        PlanUnavailableError: cuda-core, cuda-bindings or NVRTC isn't installed.
    """
    try:
        import cuda.core  # noqa: F401  what `compile_source` needs besides
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise PlanUnavailableError(f"kernels can't be compiled: {error}; install tp-walk[cu13] (or [cu12])") from error
    return int(major), int(minor)


def compile_kernel(
    source_name: str, entry: str, macros: Mapping[str, int | str] | None = None, arch: str | None = None
) -> CompiledKernel:
    """Compiles one specialisation of a source in csrc, or takes it from the cache.

    Args:
        source_name: a file in csrc, such as `walk.cu`; it may include the other files there.
        entry: an `extern "C"` kernel in it.
        macros: what the specialisation defines, as by -D.
        arch: such as `sm_90a`; None is the current GPU's.

    Raises:
        KernelError: the source doesn't compile (the message is the compiler's log), or has no such entry.
        PlanUnavailableError: there is no NVRTC.
    """
    macros = dict(macros or {})
    arch = arch or default_arch()
    key = _cache_key(source_name, macros, arch)
    cubin = _cubins.get(key)
    if cubin is None:
        path = settings().cache_dir / f"{Path(source_name).stem}-{key}.cubin"
        cubin = _read_cached(path)
        if cubin is None:
            cubin = compile_source((csrc_dir() / source_name).read_text(), source_name, macros, arch)
            _write_cached(path, cubin)
        _cubins[key] = cubin
    entries = sorted(resource_usage(cubin))
    if entry not in entries:
        raise KernelError(f"{source_name} has no entry {entry!r} with macros {macros}; it has {entries}")
    return CompiledKernel(entry, arch, cubin)


def compile_source(source: str, name: str, macros: Mapping[str, int | str], arch: str) -> bytes:
    """NVRTC's cubin of a source that may include files of csrc; no cache.

    Raises:
        KernelError: it doesn't compile; the message is the compiler's log.
        PlanUnavailableError: there is no NVRTC.
    """
    _, cubin = _compile(source, name, macros, arch)
    return cubin


def to_ptx(source_name: str, macros: Mapping[str, int | str] | None = None, arch: str = DEFAULT_ARCH) -> str:
    """The PTX from which `compile_kernel` makes its cubin: one compilation gives both."""
    from cuda.bindings import nvrtc

    program, _ = _compile((csrc_dir() / source_name).read_text(), source_name, macros or {}, arch)
    _, size = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program.handle, ptx)
    return ptx.rstrip(b"\0").decode()


def _compile(source: str, name: str, macros: Mapping[str, int | str], arch: str) -> tuple[Any, bytes]:
    nvrtc_version()  # says what is missing, where something is
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=name,
        arch=arch,
        define_macro=[(macro, str(value)) for macro, value in macros.items()] or None,
        include_path=str(csrc_dir()),
        **COMPILER_OPTIONS,
    )
    program = Program(source, "c++", options)
    try:
        return program, bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core has no public base class for NVRTC's errors
        raise KernelError(f"{name} doesn't compile for {arch} with macros {dict(macros)}: {error}") from error


def source_hash() -> str:
    """A hash of all of csrc."""
    files = [(path.name, path.read_bytes()) for path in sorted(csrc_dir().iterdir()) if path.is_file()]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def _cache_key(source_name: str, macros: Mapping[str, int | str], arch: str) -> str:
    depends_on = source_hash(), source_name, sorted(macros.items()), arch, COMPILER_OPTIONS, nvrtc_version()
    return hashlib.sha256(repr(depends_on).encode()).hexdigest()[:32]


def _read_cached(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    checksum, cubin = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(cubin).digest() != checksum:
        logger.warning("%s is damaged: compiling it again", path)
        return None
    return cubin


def _write_cached(path: Path, cubin: bytes) -> None:
    try:
        write_whole(path, hashlib.sha256(cubin).digest() + cubin)
    except OSError as error:
        logger.info("%s can't be written (%s): the kernel is kept in memory", path, error)
