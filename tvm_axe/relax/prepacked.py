"""Weights that each device of a mesh packs once, its own share of them, when they are placed.

A kernel says which of its parameters are weights in every call (`tvm_axe.records.packing`); with these free, a register
tile's schedule begins with a block that packs the panels of W. On a mesh that block becomes a function of its own,
which a session calls for each tensor of weights, and the kernel takes the packed tensor instead::

    main(x, w, out):  axe.product(x, w, out)     ->     axe_pack(w, w_packed)                    # once
                                                        main(x, w_packed, out)                   # in every call

A weight that several kernels or functions pack alike is packed once, and what nobody reads as it was is let go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_axe.analysis.blocks import unused_name
from tvm_axe.collective import SLAB
from tvm_axe.records.packing import LAYOUT_FREE, has_packing, split_packing
from tvm_axe.relax.device import DeviceFunction, DeviceModule, Pack, Placed

__all__ = ["with_free_weights", "with_packs"]

_Places = dict[int, str]
"""Arguments of a call that are slabs of weights: the tensor of each, by its position."""


def with_free_weights(shared: DeviceModule, parameters: bool) -> DeviceModule:
    """The module with kernels that say which of their parameters are weights, the same in all calls.

    Parameters
    ----------
    shared : DeviceModule
        What each device runs; nobody has scheduled it.
    parameters : bool
        Whether weights that are parameters of the model are among them, beside constants.
    """
    weights = {placed.name for placed, _ in shared.constants}
    if parameters:
        inputs = [each for function in shared.functions.values() for each in function.inputs if each.kind == "weight"]
        weights.update(placed.name for each in inputs for placed in each.tensors)
    free: dict[tvm.ir.GlobalVar, set[int]] = {}
    for function in shared.functions.values():
        for call in _calls(shared.module[function.name]):
            own = {place for place, name in _places(call, _slabs(shared.module, function)).items() if name in weights}
            free[call.op] = free.get(call.op, own) & own
    module = shared.module.clone()
    for variable, places in free.items():
        func = module[variable]
        # What asks for its device's number isn't split by upstream's pass.
        if places and all(map(tirx.is_buffer_var, func.params)):
            module[variable] = func.with_attr(LAYOUT_FREE, sorted(places))
    return replace(shared, module=module)


def with_packs(shared: DeviceModule, module: tvm.IRModule) -> tuple[DeviceModule, tvm.IRModule]:
    """What each device runs with weights that are packed before, and the scheduled module for it.

    Parameters
    ----------
    shared : DeviceModule
        What `with_free_weights` made.
    module : IRModule
        Its module, scheduled: kernels that pack do so in every call.
    """
    packing = {
        variable: split_packing(func)
        for variable, func in module.functions_items()
        if isinstance(func, tirx.PrimFunc) and has_packing(func)
    }
    if not packing:
        return shared, module
    packs = _Packs(module.clone())
    mains = {
        variable: packs.added(main, f"{variable.name_hint}_prepacked") for variable, (_, main, _) in packing.items()
    }
    functions = dict(shared.functions)
    for name, function in shared.functions.items():
        slabs, views = _slabs(module, function), dict(zip(_views(module[name], function), function.arguments))
        rewritten: dict[relax.Call, relax.Call] = {}
        for call in _calls(module[name]):
            if call.op not in packing:
                continue
            pack, _, places = packing[call.op]
            assert pack is not None  # it has packing
            arguments = list(call.args)
            made = packs.of(pack, [slabs[call.args[place]] for place in places], views)
            for place, packed in zip(places, made):
                arguments[place] = packed
            rewritten[call] = relax.Call(mains[call.op], arguments, call.attrs, call.ty_args)
        packs.module[name], functions[name] = _rewritten(module[name], function, rewritten, views)
    for variable in packing:
        del packs.module[variable]
    return replace(shared, functions=functions, packs=tuple(packs.made.values())), packs.module


class _Packs:
    """What packs tensors of the mesh, in a module."""

    def __init__(self, module: tvm.IRModule) -> None:
        self.module = module
        self.made: dict[tuple[str, ...], Pack] = {}
        self._packers: dict[int, list[tuple[tirx.PrimFunc, str]]] = defaultdict(list)

    def of(
        self, func: tirx.PrimFunc, sources: Sequence[str], views: dict[relax.Var, tuple[str, str]]
    ) -> list[relax.Var]:
        """What a function packs of tensors, as parameters, which are put among those that a device's function has."""
        packer = self._packer(func)
        made = tuple(
            Placed(f"{source} by {packer}", tuple(map(int, out.shape)), str(out.dtype), ())
            for source, out in zip(sources, func.params[len(sources) :])
        )
        key = packer, *sources
        self.made[key] = Pack(packer, tuple(sources), made)
        known = {view: var for var, view in views.items()}
        found = []
        for placed in made:
            view = placed.name, SLAB
            var = known.get(view) or relax.Var("packed", relax.TensorType(list(placed.shape), placed.dtype))
            views[var] = view
            found.append(var)
        return found

    def added(self, func: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """A function that is added to the module."""
        name = unused_name(name, [str(variable.name_hint) for variable in self.module.functions])
        builder = relax.BlockBuilder(self.module)
        variable = builder.add_func(func.with_attr("global_symbol", name), name)
        self.module = builder.get()
        return variable

    def _packer(self, func: tirx.PrimFunc) -> str:
        """The function of the module that packs tensors so; equal ones are one."""
        func = func.without_attr("global_symbol")
        same = self._packers[tvm_ffi.structural_hash(func)]
        for other, name in same:
            if tvm_ffi.structural_equal(other, func):
                return name
        kernel = self.added(func, "pack")
        name = f"axe_{kernel.name_hint}"
        params = [relax.Var(str(p.name), relax.TensorType(list(p.shape), str(p.dtype))) for p in func.params]
        builder = relax.BlockBuilder(self.module)
        with builder.function(name, params, pure=False):
            builder.emit(relax.Call(kernel, params))
            builder.emit_func_output(relax.Tuple([]))
        self.module = builder.get()
        same.append((func, name))
        return name


def _calls(func: relax.Function) -> Iterator[relax.Call]:
    """The calls of kernels."""
    for block in func.body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call) and isinstance(binding.value.op, tvm.ir.GlobalVar):
                yield binding.value


def _views(func: relax.Function, function: DeviceFunction) -> list[relax.Var]:
    """The parameters of a device's function that are tensors of the mesh."""
    first = function.numbers
    return list(func.params[first : first + len(function.arguments)])


def _slabs(module: tvm.IRModule, function: DeviceFunction) -> Mapping[relax.Var, str]:
    """The tensors of which parameters are slabs."""
    params = _views(module[function.name], function)
    return {param: name for param, (name, view) in zip(params, function.arguments) if view == SLAB}


def _places(call: relax.Call, slabs: Mapping[relax.Var, str]) -> _Places:
    """Where a call takes slabs, each in one place alone."""
    found = {n: slabs[arg] for n, arg in enumerate(call.args) if isinstance(arg, relax.Var) and arg in slabs}
    names = list(found.values())
    return {place: name for place, name in found.items() if names.count(name) == 1}


def _rewritten(
    func: relax.Function,
    function: DeviceFunction,
    calls: Mapping[relax.Call, relax.Call],
    views: Mapping[relax.Var, tuple[str, str]],
) -> tuple[relax.Function, DeviceFunction]:
    """A function with other calls, and of its tensors those that are used, or that others leave."""
    blocks, used = [], set[relax.Var]()
    for block in func.body.blocks:
        bindings = [relax.VarBinding(b.var, calls.get(b.value, b.value)) for b in block.bindings]
        for binding in bindings:
            used.update(relax.analysis.free_vars(binding.value))
        blocks.append(type(block)(bindings))
    before = set(_views(func, function))
    replaced = {arg for call in calls for arg in call.args if isinstance(arg, relax.Var) and arg in before}
    kept = {var: view for var, view in views.items() if var in used or var not in replaced}
    first = function.numbers
    others = func.params[first + len(function.arguments) :]
    params = [*func.params[:first], *kept, *others]
    body = relax.SeqExpr(blocks, func.body.body)
    rewritten = relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)
    return rewritten, replace(function, arguments=tuple(kept.values()))
