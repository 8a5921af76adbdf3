"""Registers and stack of a kernel, read from its machine code with no GPU and no CUDA tool.

A cubin is a 64-bit ELF file. The section `.nv.info` holds attributes of the kernels: a format
byte, an attribute byte and, in the format used here, 16 bits of size and the payload: the symbol
and the value, 32 bits each. The numbers of the attributes are those of `cuobjdump -elf`
(EIATTR_REGCOUNT, EIATTR_FRAME_SIZE).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_FORMAT_SIZED = 0x04


@dataclass(frozen=True, slots=True)
class CubinResources:
    """Resources of the kernel in a cubin.

    Attributes:
        registers: registers of a thread.
        stack_bytes: local memory of a thread; more than 0 means that registers spill.
    """

    registers: int
    stack_bytes: int


def cubin_resources(cubin: bytes) -> CubinResources:
    """Read the resources of the only kernel in a cubin.

    Raises:
        ValueError: when the bytes are no cubin, or one without these attributes.
    """
    try:
        attributes = dict(_attributes(_section(cubin, b".nv.info")))
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a cubin: {error}") from error
    if _REGCOUNT not in attributes:
        raise ValueError("the cubin names no register count")
    return CubinResources(attributes[_REGCOUNT], attributes.get(_FRAME_SIZE, 0))


def _section(elf: bytes, name: bytes) -> bytes:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a cubin: no 64-bit ELF header")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    for header in headers:
        start = names_offset + header[0]
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[header[4] : header[4] + header[5]]
    raise ValueError(f"the cubin has no section {name.decode()}")


def _attributes(info: bytes) -> list[tuple[int, int]]:
    """`(attribute, value)` of every attribute that holds a value of one symbol."""
    found: list[tuple[int, int]] = []
    offset = 0
    while offset < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _FORMAT_SIZED:
            if size >= 8:
                found.append((attribute, struct.unpack_from("<I", info, offset + 4)[0]))
            offset += size
    return found
