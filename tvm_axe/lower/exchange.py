"""Exchange: a tensor that lies as one layout says comes to lie as another says, whatever the two are.

Each device asks of every element that it is to hold who holds it, and where. Both answers are arithmetic on the
element's index, by the layouts' digits (`tvm_axe.layout.holding`), and in it stands the device's coordinate; so one
kernel does it, which indexes its peers' slabs and writes its own. Where the device holds the element itself it reads
its own slab: what is written in no other way than it is read crosses nothing.

It is the last resort of a redistribution: where the layouts are blocks, collectives move as little, and more cheaply
(`tvm_axe.layout.plan_redistribution`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import product

from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.blocks import element
from tvm_axe.analysis.expressions import substitute, uses
from tvm_axe.collective import ALL, SLAB
from tvm_axe.layout import Iter
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.holding import Holding, received, terms_between
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.lower.views import view_buffer

__all__ = ["Exchange"]


class Exchange:
    """What each device runs to hold a tensor as one holding says out of slabs that lie as another says.

    Of the kernel, a loop runs over each digit of the target that lies in memory; the others are the device's
    coordinates. Those that are blocks of the same coordinates in the source as in the target cancel, for the analyzer
    knows their bounds.

    Parameters
    ----------
    source, target : Holding
        How the same tensor lies before and after. The terms of a sum are added up, stay, or are made of the values
        (`terms_between`).

    Attributes
    ----------
    view : str
        The view of the source that a device needs: its own slab, the slabs along one mesh axis, or all devices'.
    """

    def __init__(self, source: Holding, target: Holding) -> None:
        self.source, self.target, mesh = source, target, source.mesh
        self.coordinates = {axis: tirx.Var(axis, "int32") for axis in mesh.names}
        self.analyzer = Analyzer()
        for axis, var in self.coordinates.items():
            self.analyzer.bind(var, ir.Range(0, mesh[axis]))
        self.loops: list[tuple[tirx.IterVar, tirx.Var]] = []
        own = target.digits(self.coordinates)
        self.index: list[tirx.Expr] = []
        for digits in target.dims:
            at: tirx.Expr = tirx.IntImm("int32", 0)
            for digit in digits:
                number = self._loop(int(digit.it.extent)) if digit.it.axis == LINEAR_MEMORY else own[digit.it]
                at = at + number * digit.radix
            self.index.append(self.analyzer.simplify(at))
        terms = terms_between(source, target)
        # What a device keeps of its own is where it is, by the condition under which it keeps it.
        known = {it: own[it] for it in terms.stay}
        known |= {digit.it: own[it] for it, digit in terms.made.items() if digit is not None}
        numbers = product(*(range(int(it.extent)) for it in terms.summed))
        self.terms = [dict(zip(terms.summed, each)) | known for each in numbers]
        self.conditions = [tirx.EQ(at, here) for at, here in target.conditions(self.coordinates)]
        self.conditions += [at < extent for at, extent in zip(self.index, target.shape)]
        self.becomes = [
            tirx.EQ(own[it], tirx.IntImm("int32", 0) if digit is None else source.number(digit, self.index))
            for it, digit in terms.made.items()
        ]
        self.devices = [self._device(term) for term in self.terms]
        self.axes = [
            axis
            for axis, var in self.coordinates.items()
            if not all(device[axis].same_as(var) for device in self.devices)
        ]
        self.view = SLAB if not self.axes else self.axes[0] if len(self.axes) == 1 else ALL

    def received(self, dtype: str) -> tuple[int, ...]:
        """Bytes that each device receives."""
        devices = range(self.source.mesh.size)
        return tuple(dtype_bytes(dtype, received(self.source, self.target, device)) for device in devices)

    def kernel(
        self, dtype: str, slabs: tuple[Sequence[int], Sequence[int]], names: tuple[str, str], page: int
    ) -> tirx.PrimFunc:
        """The function that each device runs.

        Parameters
        ----------
        dtype : str
            The type of the tensor's elements.
        slabs : tuple of two shapes
            The shapes of a slab of the source and of one of the target: the layout's addresses, row-major.
        names : tuple of two str
            What the two are called.
        page : int
            Bytes of a page of the devices' memory, of which slabs lie whole ones apart.

        Returns
        -------
        func : PrimFunc
            Of the source in the `view`, the target's slab, and the device's coordinates that it asks for, called as
            their mesh axes are.
        """
        mesh = self.source.mesh
        viewed = names[0] if self.view == SLAB else f"{names[0]}_peers"
        source = view_buffer(mesh, self.view, slabs[0], dtype, viewed, page)
        target = view_buffer(mesh, SLAB, slabs[1], dtype, names[1], page)
        place = self._place(self.source.address(self.index), slabs[0])
        loads = [tirx.BufferLoad(source, [*self._slab(device), *place]) for device in self.devices]
        value: tirx.Expr = loads[0]
        for load in loads[1:]:
            value = value + load
        if self.becomes:
            chosen = self.analyzer.simplify(tirx.all(*self.becomes))
            value = tirx.if_then_else(chosen, value, tirx.const(0, dtype))
        at = self._place(self.target.address(self.index), slabs[1])
        block = s_tir.SBlock(
            [iterator for iterator, _ in self.loops],
            [element(source, load.indices) for load in loads],
            [element(target, at)],
            f"{names[1]}_from_{names[0]}",
            tirx.BufferStore(target, value, at),
        )
        vars_of_loops = {iterator.var: loop for iterator, loop in self.loops}
        body: tirx.Stmt = s_tir.SBlockRealize(list(vars_of_loops.values()), self._mask(vars_of_loops), block)
        for iterator, loop in reversed(self.loops):
            body = tirx.For(loop, 0, iterator.dom.extent, tirx.ForKind.SERIAL, body)
        root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
        asked = [var for var in self.coordinates.values() if uses(body, var)]
        func = tirx.PrimFunc([source, target, *asked], root).with_attrs({"s_tir": True, "tirx.noalias": True})
        return s_tir.renew_defs(func)

    def _loop(self, extent: int) -> tirx.Var:
        """An iterator over a digit of the target; the digit of one number needs none."""
        var = tirx.Var(f"v{len(self.loops)}", "int32")
        domain = ir.Range(0, extent)
        self.analyzer.bind(var, domain)
        self.loops.append((tirx.IterVar(domain, var, tirx.IterVar.DataPar), tirx.Var(f"i{len(self.loops)}", "int32")))
        return var

    def _device(self, term: Mapping[Iter, object]) -> dict[str, tirx.Expr]:
        found = self.source.device(self.index, self.coordinates, term)
        return {axis: self.analyzer.simplify(tirx.const(0, "int32") + at) for axis, at in found.items()}

    def _mask(self, loops: Mapping[tirx.Var, tirx.Var]) -> tirx.Expr:
        """Whether the device holds the element: it isn't padding, and the device holds any."""
        whole = functools.reduce(tirx.all, self.conditions, tirx.IntImm("bool", 1))
        return substitute(self.analyzer.simplify(whole), dict(loops))

    def _slab(self, device: Mapping[str, tirx.Expr]) -> list[tirx.Expr]:
        """The index of a device's slab in the view."""
        if self.view == SLAB:
            return []
        number: tirx.Expr = tirx.IntImm("int32", 0)
        for axis in self.axes if self.view != ALL else self.source.mesh.names:
            number = number * self.source.mesh[axis] + device[axis]
        return [self.analyzer.simplify(number)]

    def _place(self, address: tirx.Expr | int, slab: Sequence[int]) -> list[tirx.Expr]:
        """An address as an index of the slab."""
        at = tirx.const(0, "int32") + address
        indices = []
        for dim, (extent, stride) in enumerate(zip(slab, dense_strides(slab))):
            index = at // stride if stride > 1 else at
            indices.append(self.analyzer.simplify(index if dim == 0 else index % extent))
        return indices
