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
...     print(f"{each.name:<11} {each.tensors[0].shown}")
x           R
up.weight   S0[16@0 16@1]
down.weight S1[16@0 16@1]
down.bias   S0[4@0 4@1]
>>> print(described(shared))
forward: 100% of the products' operations are shared over tp
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target

from tvm_axe.collective import registry
from tvm_axe.collective.arena import PAGE
from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.errors import InputError, LayoutError
from tvm_axe.layout import Iter, Layout, Mesh
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.layout.shares import Share
from tvm_axe.machines import backend_of
from tvm_axe.nests import Values, check_values
from tvm_axe.relax.attended import with_attention
from tvm_axe.relax.chosen import Chosen
from tvm_axe.relax.device import DeviceFunction, DeviceModule, Placed
from tvm_axe.relax.emitting import device_module
from tvm_axe.relax.forms import blocks
from tvm_axe.relax.graph import Graph
from tvm_axe.relax.kernels import with_kernels
from tvm_axe.relax.kernels_of_shares import with_kernels_there
from tvm_axe.relax.meshes import SLACK, Held, along_axes, operators_of, weights_of
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.pins import pinned
from tvm_axe.relax.placements import Over, Pin
from tvm_axe.relax.quantized import with_decoding_products
from tvm_axe.relax.reading import graph_of, legalized
from tvm_axe.relax.sizes import names_in, shape_at

__all__ = ["Pin", "described", "layout_of", "share_for", "share_model"]


def share_model(
    model: tvm.IRModule,
    mesh: Mesh,
    axis: str | None = None,
    memory: float | None = None,
    pins: Mapping[str, Pin] | None = None,
    rates: Rates = HOST,
    page: int = PAGE,
    values: Values | None = None,
    meets: bool = True,
    whole: Callable[[tvm.IRModule], tvm.IRModule] | None = None,
    gpu: Target | None = None,
    copies: bool = False,
) -> DeviceModule:
    """What each device of `mesh` runs of a Relax model.

    Its operators become functions of TensorIR, whose sharding rules say what may be shared
    (`tvm_axe.analysis.sharding_rule`); how each value is shared is chosen by cost, under a limit of memory
    (`tvm_axe.relax.choosing`); and each function becomes what a device does of it (`tvm_axe.lower.shares`). What isn't
    a function of TensorIR, and what can't be shared, every device computes whole.

    Parameters
    ----------
    model : IRModule
        Its Relax functions are straight-line code over tensors. Parameters behind the first ``num_input`` are weights;
        functions that have a weight of one name share it. Dimensions of symbolic extents are whole on every device.
    mesh : Mesh
        The devices.
    axis : str, optional
        The mesh axis along which values are shared, alike along the others; all axes if left out, one after another
        (`tvm_axe.relax.meshes`): which dimension of a value each shares is chosen.
    memory : float, optional
        Bytes of weights that a device may hold, or up to 1 the part of all; one device's share and 5% if left out.
        Where all ways hold more, the one that holds least is taken: 0 asks for that.
    pins : mapping, optional
        Values, by patterns of the names of parameters (``"layers.*.q_proj.weight"``) or, if they match none, of
        variables (``"lv3"``), with the dimension that is to be shared in blocks, None for whole on every device, the
        same by axes (``{"dp": None, "tp": 0}``, of which others stay free), or a layout that says it
        (``"S[(2, 16, 8) : (1@tp, 8, 1)]"``). Upstream's ``R.DTensor`` types, ``R.dist.annotate_sharding`` and
        ``R.dist.redistribute`` in the model pin, too.
    rates : Rates
        How fast the devices are.
    page : int
        Bytes of a page of their memory.
    values : mapping, optional
        Where shapes are symbolic, representatives of the variables, by name: the largest is what each is taken for when
        ways to share are compared; 128 of those that are left out, or their upper bound if that is less. What is chosen
        is right for all sizes.
    meets : bool
        Whether kernels may do what collectives would, by indexing the slabs of peers (`tvm_axe.relax.fusing`).
    whole : Callable, optional
        What puts a function of its own into the place of several operators, such as attention.
    gpu : Target, optional
        What the devices are, if they are GPUs: a cache in pages calls other functions there.
    copies : bool
        Whether GPUs may copy to their peers beside products, in the place of collectives (`tvm_axe.relax.beside`).

    Raises
    ------
    LowerError
        If a function isn't straight-line code over tensors; names the variable.
    LayoutError
        If the mesh has no such axis.
    InputError
        If a pin names no value, two pins differ about one, or one asks for a dimension that can't be shared; if pins
        have a device hold more weights than `memory` allows; or if there is no variable of a name in `values`.
    """
    if not isinstance(memory, int | float | None):
        raise InputError(f"memory: bytes of weights a device, or up to 1 the part of all, as a number, not {memory!r}")
    over = [axis] if axis is not None else [name for name, size in mesh.axes.items() if size > 1] or mesh.names[:1]
    along = {name: mesh[name] for name in over}  # an error where the mesh has no such axis
    operators = operators_of(along, rates, meets)
    plain, parameters = pinned(model, pins or {}, Over(mesh, over))
    module = legalized(plain, whole, on_host=gpu is None)
    functions = [str(var.name_hint) for var, func in module.functions_items() if _is_public(func)]
    if not functions:
        raise InputError("share_model: the module has no Relax function")
    typical = {name: max([1, *(n for n in own if isinstance(n, int))]) for name, own in (values or {}).items()}
    graphs = [graph_of(module, each, typical, parameters.get(each), gpu) for each in functions]
    check_values(values or {}, {name for graph in graphs for name in graph.sizes})
    held: Held = {}
    chosen: dict[str, Sequence[Chosen]] = {}
    # The function that does most decides how weights are held that others have too.
    for graph in sorted(graphs, key=lambda graph: -_operations(graph, operators[0])):
        part = 1 / math.prod(mesh[name] for name in over) + SLACK if memory is None else memory
        part = part if part <= 1 else part / max(1, weights_of(graph))
        if memory is not None:
            _check_memory(graph, along, part)
        chosen[graph.name] = along_axes(graph, operators, part, held)
    return device_module([chosen[name] for name in functions], operators, mesh, page, meets, gpu if copies else None)


def share_for(
    model: tvm.IRModule,
    mesh: Mesh,
    target: Target,
    axis: str | None = None,
    memory: float | None = None,
    pins: Mapping[str, Pin] | None = None,
    values: Values | None = None,
    meets: bool | None = None,
) -> DeviceModule:
    """What each device of a mesh of a target runs of a Relax model: `share_model` with what is known of the target.

    Parameters
    ----------
    model, mesh, axis, memory, pins, values
        As of `share_model`.
    target : Target
        Resolved.
    meets : bool, optional
        As of `share_model`. If left out, kernels do what collectives would on CPUs alone: where devices have engines
        for collectives, which is faster isn't known. If it is False, GPUs don't copy to their peers either.
    """
    backend = backend_of(target)
    known = backend.on_host if meets is None else meets
    rates = registry.for_target(target).rates
    # What a kernel computes whole, blocks say until it is shared: attention on CPUs; on GPUs norms, too, and products
    # with weights of four bits.
    kernels = functools.partial(with_attention, in_blocks=True) if backend.on_host else with_kernels

    def in_blocks(plain: tvm.IRModule) -> tvm.IRModule:
        return kernels(with_decoding_products(plain, target), target)

    gpu = None if backend.on_host else target
    shared = share_model(
        model, mesh, axis, memory, pins, rates, backend.page, values, known, in_blocks, gpu, meets is not False
    )
    return replace(shared, module=with_kernels_there(shared.module, target))


def _check_memory(graph: Graph, along: Mapping[str, int], part: float) -> None:
    """Refuse pins by which a device holds more of a function's weights than it may, however the others are shared."""
    limit, least, taken = part * weights_of(graph), 0.0, list[tuple[float, str]]()
    for value in graph.values:
        if value.kind != "weight":
            continue
        size = dtype_bytes(value.dtype, value.size)
        forms = {axis: blocks(value.shape, value.typical, dim, along[axis]) for axis, dim in value.pins.items()}
        held = size * math.prod(forms[axis].fraction() if axis in forms else 1 / n for axis, n in along.items())
        least += held
        if forms and held > size / math.prod(along.values()):
            shown = ", ".join(f"{axis}: {form}" for axis, form in forms.items())
            taken.append((held, f"{value.name} ({shown}) {math.ceil(held):,}"))
    if not taken or least <= limit:
        return
    taken.sort(reverse=True)
    more = f", and {len(taken) - 8} more" if len(taken) > 8 else ""
    raise InputError(
        f"{graph.name}: memory= allows {math.floor(limit):,} bytes of weights a device, and with what is pinned it "
        f"holds {math.ceil(least):,} at least: {', '.join(text for _, text in taken[:8])}{more}; leave pins out, pin "
        "dimensions that are shared, or allow more"
    )


def _is_public(func: tvm.ir.BaseFunc) -> bool:
    return isinstance(func, relax.Function) and "global_symbol" in (func.attrs or {})


def _operations(graph: Graph, operators: Operators) -> int:
    nodes = [node for node in graph.nodes if node.func is not None]
    return sum(sum(operators.of(node).operations) for node in nodes)


def described(shared: DeviceModule) -> str:
    """What part of the products is shared and by which axis, in a line for each function, and why what isn't is not."""
    lines = []
    for function in shared.functions.values():
        chosen = function.chosen
        parts = [f"{axis}{_along(function, at)}" for at, axis in enumerate(shared.coordinates)]
        part = np.floor(chosen.divided * 100)
        at = ", ".join(f"{name} = {size}" for name, size in chosen.graph.typical.items())
        chosen_at = f" (chosen at {at})" if at else ""
        over = " and ".join(parts)
        lines.append(f"{function.name}: {part:.0f}% of the products' operations are shared over {over}{chosen_at}")
        total = sum(count for count, _ in chosen.operations.values())
        for name, (count, share) in chosen.operations.items():
            if share >= 1:
                reason = function.levels[0].whole.get(name) or chosen.whole.get(name, "")
                lines.append(f"  not {name}, {count / total:.0%} of them: {reason}")
        lines += [f"  block by block {text}" for text in chosen.graph.apart]
    return "\n".join(lines)


def _along(function: DeviceFunction, at: int) -> str:
    """What one of several axes shares of a function."""
    if len(function.levels) == 1:
        return ""
    before = function.levels[at - 1].operations if at else {}
    now = function.levels[at].operations
    total = sum(count for count, _ in now.values()) or 1
    done = sum(count for name, (count, share) in now.items() if share < before.get(name, (0, 1.0))[1])
    weights = shared = 0
    for number in function.chosen.held:
        value = function.chosen.graph.values[number]
        if value.kind == "weight":
            forms = [*value.forms, *((function.levels[-1].axis, form) for form in function.chosen.held[number])]
            size = dtype_bytes(value.dtype, math.prod(shape_at(value.whole, function.chosen.graph.typical)))
            weights += size
            shared += size if any(form.share for axis, form in forms if axis == function.levels[at].axis) else 0
    return f" ({done / total:.0%} of them, {shared / max(1, weights):.0%} of the weights)"


def layout_of(placed: Placed, mesh: Mesh) -> Layout | None:
    """The layout that a tensor's forms are; None of blocks that don't divide, and of symbolic extents."""
    if names_in(placed.shape):
        return None
    over = [name for name, _ in placed.forms]
    copies: list[Iter] = [Iter(size, 1, name) for name, size in mesh.axes.items() if name not in over and size > 1]
    cuts: dict[int, list[tuple[str, Share]]] = {}
    for axis, form in placed.forms:
        if form.dim is not None and form.share is not None:
            cuts.setdefault(form.dim, []).append((axis, form.share))
        elif mesh[axis] > 1:
            copies.append(Iter(mesh[axis], 1, axis))
    iters: list[Iter] = []
    slab = shape_at(placed.slab, {})
    for dim, (extent, stride) in enumerate(zip(slab, dense_strides(slab))):
        own = cuts.get(dim, [])
        # Each axis cuts what the outer ones leave of a dimension, which is one piece if theirs are blocks.
        for axis, share in own[:-1]:
            if not share.is_even:
                return None
            iters.append(Iter(mesh[axis], 1, axis))
        found = own[-1][1].iters(own[-1][0], stride) if own else ((Iter(extent, stride, LINEAR_MEMORY),), ())
        if found is None:
            return None
        iters += found[0]
        copies += found[1]
    try:
        return Layout(iters, copies)
    except LayoutError:
        return None
