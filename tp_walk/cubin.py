"""What a compiled kernel takes of an SM, read from the cubin itself: needs no GPU and no disassembler.

A cubin is a 64-bit ELF file. Its `.nv.info` section is a list of attributes, `{format: u8, attribute: u8, size: u16}`
and, for format 4, `size` bytes of payload; those about a function begin with the function's index in the symbol table
(as `cuobjdump -elf` prints them). Shared memory is the size of the section `.nv.shared.<entry>`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tp_walk.errors import KernelError

_FORMAT_SIZED = 4
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12

# From sm_90 on, the section also counts what the hardware keeps for itself in each CTA, which no source declares.
_RESERVED_SHARED_BYTES = 1024
_RESERVED_SECTION = ".nv.shared.reserved.0"


@dataclass(frozen=True)
class ResourceUsage:
    """What one entry point needs.

    registers: a thread, 32-bit. stack_bytes: local memory a thread, called functions included; spilled registers live
    there, so 0 means that nothing spilled (an array indexed at run time lives there too). static_shared_bytes: a CTA,
    what the source declares with a size.
    """

    registers: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    size: int
    link: int
    data: bytes


def resource_usage(cubin: bytes) -> dict[str, ResourceUsage]:
    """The resources of each entry point, by its name.

    Raises:
        KernelError: the bytes are no cubin, or one that is cut off.
    """
    try:
        return _resource_usage(cubin)
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise KernelError(f"{len(cubin)} bytes that are no whole cubin: {error}") from error


def _resource_usage(cubin: bytes) -> dict[str, ResourceUsage]:
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    info = by_name.get(".nv.info")
    if info is None:
        raise ValueError("no section .nv.info")
    symbols = sections[info.link]
    names = sections[symbols.link].data
    reserved = _RESERVED_SHARED_BYTES if _RESERVED_SECTION in by_name else 0
    attributes: dict[str, dict[int, int]] = {}
    for attribute, payload in _attributes(info.data):
        if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, value = struct.unpack("<II", payload)
            (name_offset,) = struct.unpack_from("<I", symbols.data, 24 * symbol)
            attributes.setdefault(_string(names, name_offset), {})[attribute] = value
    usage = {}
    for function, values in attributes.items():
        # Only entry points have attributes of their own in .nv.info.<name>; called functions are within the entries'.
        if f".nv.info.{function}" in by_name and f".nv.constant0.{function}" in by_name:
            shared = by_name.get(f".nv.shared.{function}")
            usage[function] = ResourceUsage(
                registers=values[_REGCOUNT],
                stack_bytes=max(values.get(_FRAME_SIZE, 0), values.get(_MIN_STACK_SIZE, 0)),
                static_shared_bytes=max(shared.size - reserved, 0) if shared else 0,
            )
    return usage


def _sections(elf: bytes) -> list[_Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = []
    for index in range(count):
        name, kind, _, _, offset, size, link = struct.unpack_from("<IIQQQQI", elf, table + index * entry_size)
        is_empty_in_file = kind == 8  # SHT_NOBITS: shared memory has a size and no bytes
        data = b"" if is_empty_in_file else elf[offset : offset + size]
        if not is_empty_in_file and len(data) != size:
            raise ValueError(f"section {index} ends at byte {offset + size}")
        headers.append((name, size, link, data))
    names = headers[names_index][3]
    return [_Section(_string(names, name), size, link, data) for name, size, link, data in headers]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == _FORMAT_SIZED:
            yield attribute, info[position : position + size]
            position += size


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
