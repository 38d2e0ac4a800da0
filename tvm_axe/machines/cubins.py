"""What the assembler made of a kernel: registers and local memory of its threads, as a cubin says.

A cubin is an ELF file of 64 bits. Its section ``.nv.info`` is a row of attributes: a byte for the format, one for what
it is, two for the length, then a function's number in the table of symbols, and a value. NVIDIA documents neither; the
tests hold this against what nvcc prints with ``--resource-usage``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_REGISTERS, _FRAME = 0x2F, 0x11
_SIZED = 4  # the format of an attribute with as many bytes as its length says; others are all in its head
_SYMBOL = 24  # bytes


class Resources(NamedTuple):
    """What a thread of a kernel takes: registers of 32 bits, and bytes of local memory, where spilled ones are."""

    registers: int
    local_bytes: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """What threads of each kernel in a cubin take, by the kernel's name; empty if it isn't said.

    >>> resources(b"no ELF file")
    {}
    """
    if cubin[:4] != b"\x7fELF":
        return {}
    headers, sections = _sections(cubin)
    names = _symbols(cubin, headers, sections[".symtab"]) if ".symtab" in sections else []
    start, size = sections[".nv.info"][4:6] if ".nv.info" in sections else (0, 0)
    info = cubin[start : start + size]
    found: dict[str, dict[int, int]] = {}
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if attribute in (_REGISTERS, _FRAME) and length == 8:
                symbol, value = struct.unpack_from("<II", info, at)
                found.setdefault(names[symbol], {})[attribute] = value
            at += length
    return {
        name: Resources(each[_REGISTERS], each.get(_FRAME, 0)) for name, each in found.items() if _REGISTERS in each
    }


_Header = tuple[int, ...]
"""Of a section; numbers 4 and 5 are where it begins and its size, number 6 is a section that belongs to it."""


def _sections(cubin: bytes) -> tuple[list[_Header], dict[str, _Header]]:
    """The headers of an ELF file's sections, in order and by name."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * number) for number in range(count)]
    return headers, {_text(cubin, headers[names][4] + header[0]): header for header in headers}


def _symbols(cubin: bytes, headers: list[_Header], table: _Header) -> list[str]:
    """The names in a table of symbols, in order."""
    texts, (start, size) = headers[table[6]][4], table[4:6]
    places = range(start, start + size, _SYMBOL)
    return [_text(cubin, texts + struct.unpack_from("<I", cubin, at)[0]) for at in places]


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
