"""Views of memory as another type, which become memory of their own.

Upstream's LLVM code generator makes a pointer to global memory of a view's address, whichever memory it is in. Tiles
are allocated as bytes and viewed, since upstream makes float32 of what is allocated as bfloat16; so each type in which
a piece of memory is viewed gets a piece of its own. What is written in one type is never read in another.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm

_SCOPES = ("shared", "local")


def apart(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A device's function, all lowered, without views of shared memory and registers."""
    views: list[tirx.DeclBuffer] = []
    tvm_ffi.structural_walk(func.body, (tirx.DeclBuffer, views.append))
    views = [view for view in views if view.buffer.scope() in _SCOPES]
    owned: dict[tirx.Buffer, dict[str, tirx.Buffer]] = {}
    for view in views:
        held = view.data.args[0]
        own = owned.setdefault(held, {})
        (extent,), dtype = view.buffer.shape, str(view.buffer.dtype)
        most = max(int(extent), int(own[dtype].shape[0]) if dtype in own else 0)
        align = int(held.data_alignment)
        own[dtype] = tirx.decl_buffer((most,), dtype, f"{held.name}_{dtype}", scope=held.scope(), data_alignment=align)
    taken = {view.buffer: owned[view.data.args[0]][str(view.buffer.dtype)] for view in views}

    def on_allocation(made: tirx.AllocBuffer) -> tirx.Stmt:
        own = [tirx.AllocBuffer(buffer) for buffer in owned.get(made.buffer, {}).values()] or [made]
        return tirx.SeqStmt(own) if len(own) > 1 else own[0]

    def on_view(view: tirx.DeclBuffer) -> tirx.Stmt:
        return tirx.Evaluate(0) if view.buffer in taken else view

    def on_load(load: ir.TensorLoad) -> ir.Expr:
        return tirx.BufferLoad(taken[load.source], load.indices) if load.source in taken else load

    def on_store(store: tirx.BufferStore) -> tirx.Stmt:
        if store.buffer not in taken:
            return store
        return tirx.BufferStore(taken[store.buffer], store.value, store.indices)

    rules = (
        *((tirx.AllocBuffer, on_allocation), (tirx.DeclBuffer, on_view)),
        *((ir.TensorLoad, on_load), (tirx.BufferStore, on_store)),
    )
    return func.with_body(_tvm.structural_map(func.body, rules))


def shared_bytes(func: tirx.PrimFunc) -> int:
    """How much shared memory a device's function allocates, if each piece begins at a multiple of its alignment."""
    found: list[int] = []

    def on_allocation(made: tirx.AllocBuffer) -> None:
        if made.buffer.scope() == "shared":
            size = int(made.buffer.shape[0]) * int(tvm_ffi.dtype(str(made.buffer.dtype)).bits) // 8
            align = int(made.buffer.data_alignment)
            found.append(-(-size // align) * align)

    tvm_ffi.structural_walk(func.body, (tirx.AllocBuffer, on_allocation))
    return sum(found)
