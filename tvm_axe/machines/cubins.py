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
    names, info = _symbols(cubin), b""
    for name, start, size in _sections(cubin):
        if name == ".nv.info":
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


def _headers(cubin: bytes) -> tuple[list[tuple[int, ...]], int]:
    """The section headers of an ELF file, and which is that of their names."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    return [struct.unpack_from("<IIQQQQIIQQ", cubin, start + size * number) for number in range(count)], names


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()


def _sections(cubin: bytes) -> list[tuple[str, int, int]]:
    """The name, the first byte and the size of each section."""
    headers, names = _headers(cubin)
    return [(_text(cubin, headers[names][4] + header[0]), header[4], header[5]) for header in headers]


def _symbols(cubin: bytes) -> list[str]:
    """The names in the table of symbols, in order."""
    headers, _ = _headers(cubin)
    for (name, start, size), header in zip(_sections(cubin), headers):
        if name == ".symtab":
            texts = headers[header[6]][4]
            places = range(start, start + size, _SYMBOL)
            return [_text(cubin, texts + struct.unpack_from("<I", cubin, at)[0]) for at in places]
    return []
