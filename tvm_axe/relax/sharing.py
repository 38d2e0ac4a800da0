"""share_model: any Relax model becomes what each device of a mesh runs, its values shared as is cheapest.

>>> from tvm.relax.frontend import nn
>>> from tvm_axe.layout import Mesh
>>> class Block(nn.Module):
...     def __init__(self):
...         self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8)
...     def forward(self, x):
...         return self.down(nn.op.relu(self.up(x))) + x
>>> model, _ = Block().export_tvm({"forward": {"x": nn.spec.Tensor([4, 8], "float32")}})
>>> shared = share_model(model, Mesh({"tp": 2}))
>>> for each in shared.functions["forward"].inputs:
...     print(f"{each.name:<11} {each.tensors[0].form}")
x           R
up.weight   S0[16@0 16@1]
down.weight S1[16@0 16@1]
down.bias   S0[4@0 4@1]
>>> print(described(shared))
forward: 100% of the products' operations are shared over tp
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from tvm_axe.collective import ALL, registry
from tvm_axe.collective.arena import PAGE
from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.collective.tensor import peers_of
from tvm_axe.errors import InputError, LayoutError
from tvm_axe.layout import Iter, Layout, Mesh
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.layout.shares import Share
from tvm_axe.machines import backend_of
from tvm_axe.relax.choosing import Chosen, Operators, choose
from tvm_axe.relax.device import DeviceModule, device_module
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.graph import Graph, Value, graph_of, legalized

__all__ = ["described", "layout_of", "share_for", "share_model"]

Pin = int | Layout | str | None
"""A dimension, a layout in blocks, or None for whole on every device."""
SLACK = 0.05
"""The part of the weights that a device may hold beyond its share."""


def share_model(
    model: tvm.IRModule,
    mesh: Mesh,
    axis: str | None = None,
    memory: float | None = None,
    pins: Mapping[str, Pin] | None = None,
    rates: Rates = HOST,
    page: int = PAGE,
    meets: bool = True,
) -> DeviceModule:
    """What each device of `mesh` runs of a Relax model.

    Its operators become functions of TensorIR, whose sharding rules say what may be shared
    (`tvm_axe.analysis.sharding_rule`); how each value is shared is chosen by cost, under a limit of memory
    (`tvm_axe.relax.choosing`); and each function becomes what a device does of it (`tvm_axe.lower.shares`). What isn't
    a function of TensorIR, and what can't be shared, every device computes whole.

    Parameters
    ----------
    model : IRModule
        Its Relax functions are straight-line code over tensors of constant shapes. Parameters behind the first
        ``num_input`` are weights; functions that have a weight of one name share it.
    mesh : Mesh
        The devices.
    axis : str, optional
        The mesh axis along which values are shared, alike along the others; if left out, all devices share, as if they
        were on one axis. Along several axes there are no collectives, so that kernels index the peers' slabs instead.
    memory : float, optional
        Bytes of weights that a device may hold, or up to 1 the part of all; one device's share and 5% if left out.
    pins : mapping, optional
        Parameters, by patterns of their names (``"layers.*.q_proj.weight"``), with the dimension that is to be shared
        in blocks, None for whole on every device, or a layout that says the same (``"S[(2, 16, 8) : (1@tp, 8, 1)]"``).
    rates : Rates
        How fast the devices are.
    page : int
        Bytes of a page of their memory.
    meets : bool
        Whether kernels may do what collectives would, by indexing the slabs of peers (`tvm_axe.relax.fusing`).

    Raises
    ------
    LowerError
        If a function isn't straight-line code over tensors of constant shapes; names the variable.
    LayoutError
        If the mesh has no such axis.
    InputError
        If a pin names no parameter, two pins differ about one, or one asks for a dimension that can't be shared.
    """
    name = axis or (ALL if len(mesh.names) > 1 else mesh.names[0])
    devices = peers_of(mesh, name)[0]
    module = legalized(model)
    functions = [str(var.name_hint) for var, func in module.functions_items() if _is_public(func)]
    if not functions:
        raise InputError("share_model: the module has no Relax function")
    graphs = [graph_of(module, each) for each in functions]
    operators = Operators(devices, rates, whole_mesh=name == ALL)
    pinned = _pins(graphs, pins or {}, mesh, name)
    chosen: list[Chosen] = []
    held: dict[tuple[str, tuple[int, ...], str], Form] = {}
    # The function that does most decides how weights are held that others have too.
    for at in sorted(range(len(graphs)), key=lambda at: -_operations(graphs[at], operators)):
        graph = graphs[at]
        fixed = dict(pinned[at])
        for number, value in enumerate(graph.values):
            if (
                value.kind == "weight"
                and value.constant is None
                and (key := (value.name, value.shape, value.dtype)) in held
            ):
                fixed.setdefault(number, held[key])
        weights = sum(dtype_bytes(v.dtype, v.size) for v in graph.values if v.kind == "weight")
        share = 1 / devices + SLACK if memory is None else memory
        found = choose(graph, operators, share * weights if share <= 1 else share, fixed)
        for number, forms in found.held.items():
            value = graph.values[number]
            if value.kind == "weight" and value.constant is None and forms:
                held.setdefault((value.name, value.shape, value.dtype), forms[0])
        chosen.append(found)
    chosen.sort(key=lambda each: functions.index(each.graph.name))
    return device_module(chosen, module, operators, mesh, name, page, meets)


def share_for(
    model: tvm.IRModule,
    mesh: Mesh,
    target: Target,
    axis: str | None = None,
    memory: float | None = None,
    pins: Mapping[str, Pin] | None = None,
    meets: bool | None = None,
) -> DeviceModule:
    """What each device of a mesh of a target runs of a Relax model: `share_model` with what is known of the target.

    Parameters
    ----------
    model, mesh, axis, memory, pins
        As of `share_model`.
    target : Target
        Resolved.
    meets : bool, optional
        As of `share_model`. If left out, kernels do what collectives would on CPUs alone: where devices have engines
        for collectives, which is faster isn't known.
    """
    backend = backend_of(target)
    known = backend.on_host if meets is None else meets
    return share_model(model, mesh, axis, memory, pins, registry.for_target(target).rates, backend.page, known)


def _is_public(func: tvm.ir.BaseFunc) -> bool:
    return isinstance(func, relax.Function) and "global_symbol" in (func.attrs or {})


def _operations(graph: Graph, operators: Operators) -> int:
    nodes = [node for node in graph.nodes if node.func is not None]
    return sum(sum(operators.of(node.func, len(node.ins)).operations) for node in nodes)


def _pins(graphs: list[Graph], pins: Mapping[str, Pin], mesh: Mesh, axis: str) -> list[dict[int, Form]]:
    """The forms that parameters are pinned to, by number, of each function."""
    found: list[dict[int, Form]] = [{} for _ in graphs]
    by: dict[tuple[int, int], str] = {}
    for pattern, pin in pins.items():
        hits = 0
        for at, graph in enumerate(graphs):
            for number in graph.params:
                value = graph.values[number]
                if not fnmatchcase(value.name, pattern):
                    continue
                hits += 1
                form = _pinned(pattern, pin, value, mesh, axis)
                if found[at].setdefault(number, form) != form:
                    raise InputError(
                        f"pins {by[at, number]!r} and {pattern!r} differ about {value.name}: {found[at][number]} and "
                        f"{form}; leave one out"
                    )
                by.setdefault((at, number), pattern)
        if not hits:
            names = ", ".join(dict.fromkeys(graph.values[n].name for graph in graphs for n in graph.params))
            raise InputError(f"pin {pattern!r} is of no parameter; there are {names}")
    return found


def _pinned(pattern: str, pin: Pin, value: Value, mesh: Mesh, axis: str) -> Form:
    """The form that a pin asks for."""
    dim = pin
    if isinstance(pin, Layout | str):
        layout = Layout.parse(pin) if isinstance(pin, str) else pin
        cut = layout.sharding(value.shape, mesh)
        if set(cut.values()) - {axis}:
            raise InputError(
                f"pin {pattern!r}: {layout} shares {value.name} over {', '.join(sorted(set(cut.values())))}; "
                f"the model is shared over {axis} alone"
            )
        dim = next(iter(cut), None)
    assert not isinstance(dim, Layout | str)  # it has been read
    if dim is None:
        return WHOLE
    if not 0 <= dim < len(value.shape):
        raise InputError(
            f"pin {pattern!r}: {value.name} has {len(value.shape)} dimensions, there is no dimension {dim}"
        )
    share = Share.blocks(value.shape[dim], peers_of(mesh, axis)[0])
    return WHOLE if share.is_whole else Form(dim, share)


def described(shared: DeviceModule) -> str:
    """What part of the products is shared, in a line for each function, and what isn't."""
    lines = []
    for function in shared.functions.values():
        chosen = function.chosen
        whole = [name for name, (_, share) in chosen.operations.items() if share >= 1]
        lacking = f"; not: {', '.join(whole)}, because that is cheaper or nothing of them can be" if whole else ""
        part = np.floor(chosen.divided * 100)
        over = "all devices" if shared.axis == ALL else shared.axis
        lines.append(f"{function.name}: {part:.0f}% of the products' operations are shared over {over}{lacking}")
    return "\n".join(lines)


def layout_of(form: Form, shape: tuple[int, ...], mesh: Mesh, axis: str) -> Layout | None:
    """The layout that a form is; None where it is none, as of blocks that don't divide."""
    iters: list[Iter] = []
    copies: list[Iter] = [Iter(size, 1, name) for name, size in mesh.axes.items() if name != axis and size > 1]
    for dim, (extent, stride) in enumerate(zip(shape, dense_strides(form.local(shape)))):
        if dim != form.dim or form.share is None:
            iters.append(Iter(extent, stride, LINEAR_MEMORY))
            continue
        found = None if axis == ALL else form.share.iters(axis, stride)
        if found is None:
            return None
        iters += found[0]
        copies += found[1]
    if form.share is None and axis != ALL and mesh[axis] > 1:
        copies.append(Iter(mesh[axis], 1, axis))
    try:
        return Layout(iters, copies)
    except LayoutError:
        return None
