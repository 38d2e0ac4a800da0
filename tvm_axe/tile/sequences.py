"""Functions of several kernels, read: each kernel as a program of its own, and the scratch that they share.

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def shares(A: T.Buffer((8, 64), "float32"), B: T.Buffer((8, 64), "float32")):
...     total = tile.scratch((8,), "float32")
...     with tile.kernel(8) as i:
...         a = tile.fragment((1, 64), "float32")
...         s = tile.fragment((1,), "float32")
...         tile.copy(A[i, 0], a)
...         tile.sum(a, s)
...         tile.copy(s, total[i])
...     with tile.kernel(8) as j, tile.parallel(64) as x:
...         B[j, x] = A[j, x] / total[j]
>>> print(tile.read_sequence(shares))
function shares(A, B)
    global A: float32[8, 64]
    global B: float32[8, 64]
    scratch total: float32[8]
    kernel shares_1(A, total) for i < 8
        global A: float32[8, 64]
        global total: float32[8]
        fragment a: float32[1, 64]
        fragment s: float32[1]
        copy A[i, 0:64] to a
        s = sum of a along 1
        copy s to total[i]
    kernel shares_2(A, B, total) for j < 8
        global A: float32[8, 64]
        global B: float32[8, 64]
        global total: float32[8]
        parallel 64 into B

Kernels run in order, on one stream: a kernel sees what those before it have stored to global memory, and begins with
no barrier that the author would write. A knob may choose between kernels, by an `if` of knobs around them; its values
may leave scratch that no kernel uses, which then isn't there.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from tvm_axe.errors import TileError
from tvm_axe.tile.assuming import assumptions_of
from tvm_axe.tile.checks import check_written
from tvm_axe.tile.cuts import cut, is_sequence, unused
from tvm_axe.tile.knobs import settings, settled
from tvm_axe.tile.mesh import is_mesh_tensor
from tvm_axe.tile.program import TileProgram, TileSequence, name_of
from tvm_axe.tile.reading import Reader, check_function, placed, read
from tvm_axe.tile.regions import Tile, constant

__all__ = ["read_function", "read_sequence"]


def read_function(
    func: tirx.PrimFunc, knobs: Mapping[str, int] | None = None, reason: str = "set"
) -> TileProgram | TileSequence:
    """Read a function of one kernel as `tvm_axe.tile.read` does, and one of several as `read_sequence`.

    Raises
    ------
    InputError, TileError
        As these.
    """
    several = isinstance(func, tirx.PrimFunc) and is_sequence(func)
    return read_sequence(func, knobs, reason) if several else read(func, knobs, reason)


def read_sequence(func: tirx.PrimFunc, knobs: Mapping[str, int] | None = None, reason: str = "set") -> TileSequence:
    """Read a function of several kernels, one after the other, and check what holds on every target.

    Parameters
    ----------
    func : PrimFunc
        The function.
    knobs : mapping from str to int, optional
        What its knobs are (`tvm_axe.tile.knobs`); those that are left out have their defaults.
    reason : str
        Why the knobs are what `knobs` says, for `explain`.

    Raises
    ------
    InputError
        There is no such knob or value, or the function doesn't allow them together.
    TileError
        A kernel is malformed (`tvm_axe.tile.read`); there is none; there is something else beside them but scratch and
        what is said of sizes; a tensor is one of a mesh; scratch isn't used, is read before it was written, has another
        tensor's name, or extents that aren't known from the parameters.
    """
    check_function(func)
    name, left = name_of(func), unused(func)
    if left:
        raise TileError(f"{name}: no kernel uses the scratch {', '.join(left)}; valid is a function without it")
    mesh = [str(param.name) for param in func.params if tirx.is_buffer_var(param) and is_mesh_tensor(param)]
    if mesh:
        raise TileError(
            f"{name}: {', '.join(mesh)} of a mesh in a function of several kernels or with tile.scratch; valid is one "
            "kernel a function, and tensors of the caller's for what they share"
        )
    own = placed(settled(func, knobs or {}))
    params, scalars = Reader(own).parameters()
    parts = cut(own)
    if parts.scratch and not params:
        raise TileError(f"{name}: scratch in a function without a tensor, of which no caller sees anything")
    if not parts.kernels:
        raise TileError(f"{name}: it has no kernel; valid are functions with one `with tile.kernel(...)` or more")
    scratch = tuple(
        Tile(buffer, "global", tuple(constant(extent) for extent in buffer.shape), str(buffer.dtype))
        for buffer in parts.scratch
    )
    kernels = tuple(read(part) for part in parts.kernels)
    empty = {tile.buffer for tile in scratch}
    for kernel in kernels:
        check_written(kernel, empty)
        empty -= {tile.buffer for node in kernel.nodes() for tile in node.writes}
    assumptions, _ = assumptions_of(own)
    return TileSequence(own, params, scalars, scratch, kernels, settings(func, knobs or {}, reason), assumptions)
