"""Layouts that hardware prescribes, and the usual ones of a device mesh, each by its name.

The fragments of NVIDIA's tensor-core instructions say which lane of a warp holds an element, and in which of its
registers, counted in elements:

>>> print(mma_a("float16", 16))
S[(2, 8, 2, 4, 2) : (2, 4@laneid, 4, 1@laneid, 1)]
>>> mma_a("float16", 16).apply(9, 3, shape=(16, 16))
frozenset({Coordinate({'laneid': 5, 'm': 3})})

A warpgroup's fragments have the axis ``tid_in_wg``, and shared memory that wgmma reads is swizzled:

>>> print(wgmma_c(16))
S[(4, 2, 8, 2, 4, 2) : (32@tid_in_wg, 2, 4@tid_in_wg, 4, 1@tid_in_wg, 1)]
>>> print(wgmma_shared((64, 64), "float16"))
ComposeLayout(3, 3, 3, S[4096 : 1])

Sources: each function's own. Section numbers are those of the PTX ISA, version 9.2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import check_int
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.shapes import check_shape
from tvm_axe.layout.swizzle import ComposeLayout

LANE, THREAD = "laneid", "tid_in_wg"
REGISTER_BITS = 32
ATOM_ROWS, CHUNK_BYTES = 8, 16  # of the swizzled layouts of shared memory: rows of an atom, bytes that stay together

PARTITIONS = 128  # of a Trainium scratchpad

_TMEM_ROWS = {"A": 128, "B": 64, "C": 64, "D": 128, "E": 64, "F": 64, "G": 32}
_MESH_TERM = re.compile(r"R|S([0-9]+)")


def _layout(*iters: tuple[int, int, str]) -> Layout:
    """Return the layout of iters (extent, stride, axis), without those of one step."""
    return Layout([Iter(*it) for it in iters if it[0] != 1])


def mma_a(dtype: str, k: int) -> Layout:
    """Return where a warp holds A, of shape (16, k), of ``mma.m16n8k<k>``.

    Law, with e = 32 / bits elements in a register, and g, t = laneid / 4, laneid % 4: element i of a lane is at row g,
    or g + 8 where i / e is odd; and at column t * e + i % e, or 4 * e further where i / e is 2 or 3.

    Parameters
    ----------
    dtype : str
        The elements' type, of 4, 8, 16 or 32 bits (``float32`` is what the ISA calls tf32).
    k : int
        4 * e or 8 * e: 8 or 16 for types of 16 bits.

    Raises
    ------
    LayoutError
        If there is no such instruction.

    Notes
    -----
    Source: PTX ISA 9.7.14.5, matrix fragments for mma.m16n8k4 to mma.m16n8k64, multiplicand A.
    """
    packed, halves = _mma_register(dtype, k)
    return _layout((2, packed, "m"), (8, 4, LANE), (halves, 2 * packed, "m"), (4, 1, LANE), (packed, 1, "m"))


def mma_b(dtype: str, k: int) -> Layout:
    """Return where a warp holds B, of shape (k, 8), of ``mma.m16n8k<k>``.

    Law, in the words of `mma_a`: element i of a lane is at column g, and at row t * e + i % e, or 4 * e further where
    i >= e.

    Parameters and Raises are those of `mma_a`.

    Source: PTX ISA 9.7.14.5, matrix fragments for mma.m16n8k4 to mma.m16n8k64, multiplicand B.
    """
    packed, halves = _mma_register(dtype, k)
    return _layout((halves, packed, "m"), (4, 1, LANE), (packed, 1, "m"), (8, 4, LANE))


def mma_c() -> Layout:
    """Return where a warp holds the accumulators C and D, of shape (16, 8), of every ``mma.m16n8k*``.

    Law, in the words of `mma_a`: element i of a lane is at row g, or g + 8 where i >= 2, and at column 2 * t + i % 2.

    >>> print(mma_c())
    S[(2, 8, 4, 2) : (2, 4@laneid, 1@laneid, 1)]

    Source: PTX ISA 9.7.14.5, matrix fragments for mma.m16n8k8 and its kin, accumulators.
    """
    return _layout((2, 2, "m"), (8, 4, LANE), (4, 1, LANE), (2, 1, "m"))


def _mma_register(dtype: str, k: int) -> tuple[int, int]:
    """Return the number of elements in a register, and how many registers a row of A takes."""
    bits = dtype_bits(dtype)
    if bits not in (4, 8, 16, 32):
        raise LayoutError(f"dtype must have 4, 8, 16 or 32 bits to be a multiplicand of mma.m16n8, not {dtype!r}")
    packed = REGISTER_BITS // bits
    if check_int("k", k) not in (4 * packed, 8 * packed):
        raise LayoutError(f"k must be {4 * packed} or {8 * packed} in mma.m16n8 of {dtype}, not {k}")
    return packed, k // (4 * packed)


def ldmatrix(num: int, trans: bool = False) -> Layout:
    """Return where ``ldmatrix.m8n8.x<num>`` puts matrices of 16-bit elements, of shape (num, 8, 8).

    Law: element (j, row, column) is in register j of lane row * 4 + column / 2, in its half column % 2; with `trans`
    rows and columns are exchanged. ``stmatrix`` takes them from there.

    >>> print(ldmatrix(4), "or", ldmatrix(1, trans=True))
    S[(4, 8, 4, 2) : (2, 4@laneid, 1@laneid, 1)] or S[(4, 2, 8) : (1@laneid, 1, 4@laneid)]

    Parameters
    ----------
    num : int
        1, 2 or 4 matrices.
    trans : bool
        Whether each is transposed on the way.

    Raises
    ------
    LayoutError
        If `num` is another number.

    Notes
    -----
    Source: PTX ISA 9.7.14.5.15, ldmatrix.
    """
    if check_int("num", num) not in (1, 2, 4):
        raise LayoutError(f"num must be 1, 2 or 4 matrices, not {num}")
    row, column = [(8, 4, LANE)], [(4, 1, LANE), (2, 1, "m")]
    return _layout((num, 2, "m"), *(column + row if trans else row + column))


def wgmma_a(dtype: str) -> Layout:
    """Return where a warpgroup holds A, of shape (64, 256 / bits), of ``wgmma.m64n*`` in registers.

    Law: warp w of the four holds rows [16 * w, 16 * w + 16) as `mma_a` has them.

    >>> print(wgmma_a("float16"))
    S[(4, 2, 8, 2, 4, 2) : (32@tid_in_wg, 2, 4@tid_in_wg, 4, 1@tid_in_wg, 1)]

    Parameters
    ----------
    dtype : str
        The elements' type, of 8, 16 or 32 bits.

    Raises
    ------
    LayoutError
        If there is no such instruction.

    Notes
    -----
    Source: PTX ISA 9.7.15.5.1.1, register fragments of wgmma.mma_async, multiplicand A.
    """
    bits = dtype_bits(dtype)
    if bits not in (8, 16, 32):
        raise LayoutError(f"dtype must have 8, 16 or 32 bits to be a multiplicand of wgmma, not {dtype!r}")
    return _warpgroup(mma_a(dtype, 8 * REGISTER_BITS // bits))


def wgmma_c(n: int) -> Layout:
    """Return where a warpgroup holds the accumulator D, of shape (64, n), of ``wgmma.m64n<n>``.

    Law: element i of thread t is at row 16 * (t / 32) + t % 32 / 4, plus 8 where i / 2 is odd, and at column
    8 * (i / 4) + 2 * (t % 4) + i % 2. Elements of 16 bits are at the same places, two in a register.

    Parameters
    ----------
    n : int
        A multiple of 8, from 8 to 256.

    Raises
    ------
    LayoutError
        If there is no such instruction.

    Notes
    -----
    Source: PTX ISA 9.7.15.5.1.1, register fragments of wgmma.mma_async, accumulator D.
    """
    if check_int("n", n) not in range(8, 257, 8):
        raise LayoutError(f"n must be a multiple of 8 from 8 to 256 in wgmma.m64n, not {n}")
    per_warp = _layout((2, 2, "m"), (8, 4, LANE), (n // 8, 4, "m"), (4, 1, LANE), (2, 1, "m"))
    return _warpgroup(per_warp)


def _warpgroup(per_warp: Layout) -> Layout:
    """Return four copies of a warp's fragment, one below the other, in the threads of a warpgroup."""
    threads = (Iter(it.extent, it.stride, THREAD if it.axis == LANE else it.axis) for it in per_warp.D)
    return Layout([Iter(4, 32, THREAD), *threads])


def wgmma_shared(shape: Sequence[int], dtype: str, swizzle: int = 128) -> ComposeLayout:
    """Return the layout of an operand in shared memory, as wgmma, tcgen05.mma and TMA read and write it.

    Law: the rows are cut into panels of `swizzle` bytes, each stored whole before the next, row by row. Within a panel
    the pieces of 16 bytes are exchanged: the lowest log2(swizzle / 16) bits of a piece's number in its row are XORed
    with those of the number of 128 bytes before it.

    Parameters
    ----------
    shape : Sequence[int]
        (m or n, k) of an operand that is K-major; (k, m or n) of one that is MN-major.
    dtype : str
        The elements' type.
    swizzle : int
        The bytes of a panel's row, the swizzling mode: 128, 64 or 32.

    Raises
    ------
    LayoutError
        If the shape is not of whole atoms, of 8 rows and `swizzle` bytes each, or the mode is none of these.

    Notes
    -----
    Source: PTX ISA 9.7.15.5.1.2, shared memory matrix layout; CUTLASS, Swizzle<B, 4, 3> of bytes with B = 3, 2, 1.
    """
    if check_int("swizzle", swizzle) not in (128, 64, 32):
        raise LayoutError(f"swizzle must be 128, 64 or 32 bytes, not {swizzle}")
    bits = dtype_bits(dtype)
    if CHUNK_BYTES * 8 % bits or bits & (bits - 1):
        raise LayoutError(f"dtype must have a power of two of bits, at most {CHUNK_BYTES * 8}, not {dtype!r}")
    shape, width = check_shape(shape), swizzle * 8 // bits
    if len(shape) != 2 or shape[0] % ATOM_ROWS or shape[1] % width:
        raise LayoutError(
            f"shape must be (rows, columns), multiples of ({ATOM_ROWS}, {width}) for a swizzle of {swizzle} bytes of "
            f"{dtype}, not {shape}"
        )
    rows, panels = shape[0], shape[1] // width
    tile = _layout((rows, width, "m"), (panels, rows * width, "m"), (width, 1, "m")).canonicalize()
    together = CHUNK_BYTES * 8 // bits
    return ComposeLayout(together.bit_length() - 1, (swizzle // CHUNK_BYTES).bit_length() - 1, 3, tile)


def tmem(datapath: str, columns: int) -> Layout:
    """Return where ``tcgen05.mma`` puts a CTA's part of D in tensor memory, of shape (rows, columns).

    Law, by data path: A and D (128 rows) have row r in lane r. C and F (64 rows) have it in lane
    r / 16 * 32 + r % 16. B and E (64 rows) have its second half of columns in lane r + 64, G (32 rows) its quarters q
    in lanes r + 32 * q; the columns of halves and quarters are counted from 0.

    >>> print(tmem("D", 64), "or", tmem("F", 64))
    S[(128, 64) : (1@TLane, 1@TCol)] or S[(4, 16, 64) : (32@TLane, 1@TLane, 1@TCol)]

    Parameters
    ----------
    datapath : str
        "A" to "G", the ISA's letter: A is M = 256, B and C are M = 128 of a pair of CTAs (dense, sparse), D is M = 128,
        E and F are M = 64 (.ws, otherwise), G is M = 32.
    columns : int
        The number of 32-bit columns; even in B and E, a multiple of 4 in G.

    Raises
    ------
    LayoutError
        If there is no such data path, or `columns` doesn't divide.

    Notes
    -----
    Source: PTX ISA, tcgen05.mma, data path layout organization.
    """
    if datapath not in _TMEM_ROWS:
        raise LayoutError(f"datapath must be one of {', '.join(_TMEM_ROWS)}, not {datapath!r}")
    rows, parts = _TMEM_ROWS[datapath], {"B": 2, "E": 2, "G": 4}.get(datapath, 1)
    if check_int("columns", columns, 1) % parts:
        raise LayoutError(f"columns must be a multiple of {parts} in data path {datapath}, not {columns}")
    if datapath in "CF":
        return _layout((4, 32, "TLane"), (16, 1, "TLane"), (columns, 1, "TCol"))
    return _layout((rows, 1, "TLane"), (parts, rows, "TLane"), (columns // parts, 1, "TCol"))


def trainium(dims: str, shape: Sequence[int]) -> Layout:
    """Return the layout of a tensor in a Trainium scratchpad, of 128 partitions P with a free dimension F each.

    Law: the position on P is the row-major position in the dimensions marked "P", and that on F in those marked "F". A
    single P of more than 128 is cut into parts of 128, which follow one another on F.

    >>> print(trainium("PF", (128, 512)), "or", trainium("PF", (256, 512)))
    S[(128, 512) : (1@P, 1@F)] or S[(2, 128, 512) : (512@F, 1@P, 1@F)]

    Parameters
    ----------
    dims : str
        "P" or "F" for each dimension.
    shape : Sequence[int]
        The tensor's shape.

    Raises
    ------
    LayoutError
        If `dims` is malformed, or the P dimensions take more than 128 partitions and aren't one multiple of 128.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), section 2.2 (figure 2) and appendix H.
    """
    shape = check_shape(shape)
    if not isinstance(dims, str) or set(dims) - {"P", "F"} or len(dims) != len(shape):
        raise LayoutError(f'dims must have a "P" or an "F" for each dimension of {shape}, not {dims!r}')
    partitions = math.prod(extent for extent, mark in zip(shape, dims) if mark == "P")
    parts, rest = divmod(partitions, PARTITIONS)
    if partitions > PARTITIONS and (rest or dims.count("P") > 1):
        raise LayoutError(
            f"the dimensions marked P have {partitions} elements in shape {shape}: they must be at most {PARTITIONS}, "
            f"or one dimension that is a multiple of it"
        )
    found: list[tuple[int, int, str]] = []
    stride = {"P": 1, "F": 1}
    for extent, mark in zip(reversed(shape), reversed(dims)):
        held = min(extent, PARTITIONS) if mark == "P" else extent
        found.insert(0, (held, stride[mark], mark))
        stride[mark] *= held
    if parts > 1:
        found.insert(dims.index("P"), (parts, stride["F"], "F"))
    return _layout(*found)


def mesh_sharding(spec: str, shape: Sequence[int], mesh: Mesh) -> Layout:
    """Return the layout of a tensor on a mesh, by what becomes of each of its dimensions.

    Law: "R" leaves a dimension whole; "S" and the numbers of mesh axes cut it into blocks over these, the first the
    major one; each device holds its block row-major, and mesh axes that are not named hold replicas.

    >>> mesh = Mesh({"x": 2, "y": 2})
    >>> for spec in ("S0S1", "S0R", "S01R"):
    ...     print(mesh_sharding(spec, (8, 8), mesh))
    S[(2, 4, 2, 4) : (1@x, 4, 1@y, 1)]
    S[(2, 4, 8) : (1@x, 8, 1)] + R[2 : 1@y]
    S[(2, 2, 2, 8) : (1@x, 1@y, 8, 1)]

    Parameters
    ----------
    spec : str
        One term for each dimension, such as "S0R" for a matrix; a mesh axis is written as its number, one digit.
    shape : Sequence[int]
        The tensor's shape.
    mesh : Mesh
        The devices.

    Raises
    ------
    LayoutError
        If `spec` is malformed, names an axis twice or one that the mesh lacks; or as `Placement.layout`.

    Notes
    -----
    Source: Alpa (arXiv:2201.12023), table 1; S0S1 and S0R are examples of Axe (arXiv:2601.19092), section 2.2, too.
    """
    if not isinstance(spec, str) or not re.fullmatch(f"(?:{_MESH_TERM.pattern})*", spec):
        raise LayoutError(f'spec must be terms "R" or "S" with digits, such as "S0R" or "S01R", not {spec!r}')
    terms = [found[1] or "" for found in _MESH_TERM.finditer(spec)]
    unknown = [digit for digit in "".join(terms) if int(digit) >= len(mesh.names)]
    if unknown:
        raise LayoutError(f"spec {spec!r} names mesh axis {unknown[0]}, and mesh {mesh} has {len(mesh.names)} axes")
    return Placement(tuple(tuple(mesh.names[int(digit)] for digit in term) for term in terms)).layout(shape, mesh)
