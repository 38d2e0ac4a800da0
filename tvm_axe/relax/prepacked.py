"""Weights that each device of a mesh packs once, its own share of them, when they are placed.

On CPUs a kernel says which of its parameters are weights in every call (`tvm_axe.records.packing`); with these free, a
register tile's schedule begins with a block that packs the panels of W. On a mesh that block becomes a function of its
own, which a session calls for each tensor of weights, and the kernel takes the packed tensor instead::

    main(x, w, out):  axe.product(x, w, out)     ->     axe_pack(w, w_packed)                    # once
                                                        main(x, w_packed, out)                   # in every call

On GPUs the model has calls that do nothing but bring weights into the order in which a kernel reads them, such as codes
of four bits (`tvm_axe.relax.quantized`). What is called with weights alone is called once in the same way::

    main(x, w, out):  packed_codes(w, own)       ->     axe_packed_codes(w, w_packed)            # once
                      w4a16_matmul(x, own, out)         main(x, w_packed, out)                   # in every call

A weight that several kernels or functions pack alike is packed once, and what nobody reads as it was is let go.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_axe.analysis.blocks import unused_name
from tvm_axe.collective import SLAB
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.records.packing import LAYOUT_FREE, has_packing, split_packing
from tvm_axe.relax.device import DeviceFunction, DeviceModule, Pack, Placed
from tvm_axe.relax.values import is_call, shape_of

__all__ = ["with_free_weights", "with_made_once", "with_packs"]

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
    weights = _weights(shared, parameters)
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


def with_made_once(shared: DeviceModule, parameters: bool) -> DeviceModule:
    """What each device runs with calls of kernels on weights alone done before, where a call would do them each time.

    What makes floats of fewer bits is left in the call, as memory for weights is limited.

    Parameters
    ----------
    shared : DeviceModule
        What each device runs; nobody has scheduled it.
    parameters : bool
        Whether weights that are parameters of the model are among them, beside constants.
    """
    functions = dict(shared.functions)
    changed = {name for function in functions.values() for name in function.overwritten}
    weights = _weights(shared, parameters) - changed
    packs = _Packs(shared.module.clone())
    for name, function in shared.functions.items():
        packs.module[name], functions[name] = _Made(shared, function, packs, weights).rewritten()
    return replace(shared, module=packs.module, functions=functions, packs=(*shared.packs, *packs.made.values()))


class _Made:
    """A device's function, and what it makes of weights alone in memory that it allocates for that."""

    def __init__(self, shared: DeviceModule, function: DeviceFunction, packs: _Packs, weights: set[str]) -> None:
        self.module, self.function, self.packs = shared.module, function, packs
        self.func = func = shared.module[function.name]
        last = function.numbers + len(function.arguments)
        self.coordinates = dict(zip(func.params[last:], shared.coordinates))
        self.views = dict(zip(_views(func, function), function.arguments))
        self.fixed = {param: name for param, name in _slabs(shared.module, function).items() if name in weights}
        self.bindings = [binding for block in func.body.blocks for binding in block.bindings]
        self.own = {
            binding.var
            for binding in self.bindings
            if is_call(binding.value, "relax.builtin.alloc_tensor") and shape_of(binding.var) is not None
        }
        # What is stored to once, and else only read by kernels, in which it may be another tensor.
        times = Counter(var for binding in self.bindings for var in self._stored(binding.value))
        self.own -= {var for var, count in times.items() if count > 1}

    def _stored(self, value: relax.Expr) -> Iterator[relax.Var]:
        """The variables that a call stores to; more than once those of which that isn't known."""
        if _is_kernel(value):
            written = _written(self.module[value.op])
            yield from (arg for at, arg in enumerate(value.args) if at in written)
        else:
            yield from (var for var in relax.analysis.free_vars(value) for _ in range(2))

    def rewritten(self) -> tuple[relax.Function, DeviceFunction]:
        """The function without what is made once."""
        made: dict[relax.Var, relax.Var] = {}
        gone: set[relax.Var] = set()
        calls: dict[relax.Call, relax.Call] = {}
        for binding in self.bindings:
            call = binding.value
            if not _is_kernel(call):
                continue
            found = self._made(call)
            if found:
                made |= found
                gone |= {binding.var, *found}
            elif any(arg in made for arg in call.args):
                calls[call] = relax.Call(call.op, [made.get(arg, arg) for arg in call.args], call.attrs, call.ty_args)
        if not made:
            return self.func, self.function
        read = [arg for binding in self.bindings if binding.var in gone for arg in binding.value.args]
        # Each step with a function is a call of a kernel, in order; behind them results are copied.
        kernels = (binding.var for binding in self.bindings if _is_kernel(binding.value))
        steps = tuple(step for step in self.function.steps if step.func is None or next(kernels) not in gone)
        return _rewritten(self.func, replace(self.function, steps=steps), calls, self.views, gone, read)

    def _made(self, call: relax.Call) -> dict[relax.Var, relax.Var]:
        """The parameters in the place of what a call makes of weights alone; empty if it doesn't."""
        written = _written(self.module[call.op])
        outs = [arg for at, arg in enumerate(call.args) if at in written]
        others = [arg for at, arg in enumerate(call.args) if at not in written]
        sources = [arg for arg in others if arg in self.fixed]
        if not sources or not all(arg in self.fixed or arg in self.coordinates for arg in others):
            return {}
        if not all(arg in self.own for arg in outs) or not _moves(sources, outs):
            return {}
        axes = [self.coordinates[arg] for arg in others if arg not in self.fixed]
        found = self.packs.of_weights(call.op, [self.fixed[arg] for arg in sources], axes, self.views)
        # What is made may be packed further.
        self.fixed |= {var: self.views[var][0] for var in found}
        self.fixed |= {own: self.views[var][0] for own, var in zip(outs, found)}
        return dict(zip(outs, found))


def _weights(shared: DeviceModule, parameters: bool) -> set[str]:
    """The tensors of constants, and of weights that are parameters of the model if these are asked for."""
    found = {placed.name for placed, _ in shared.constants}
    if parameters:
        inputs = [each for function in shared.functions.values() for each in function.inputs if each.kind == "weight"]
        found.update(placed.name for each in inputs for placed in each.tensors)
    return found


def _written(func: tirx.PrimFunc) -> set[int]:
    """Which parameters a function stores to."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, stores.append))
    return {at for at, param in enumerate(func.params) if any(store.buffer.same_as(param) for store in stores)}


def _moves(sources: Sequence[relax.Var], outs: Sequence[relax.Var]) -> bool:
    """Whether what is made is integers, or takes no more memory than what it is made of."""
    before, after = (
        sum(dtype_bytes(str(var.ty.dtype), math.prod(shape_of(var) or ())) for var in some) for some in (sources, outs)
    )
    return after <= before or all("int" in str(var.ty.dtype) for var in outs)


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
        self.made[key] = Pack(packer, tuple(sources), (), made)
        return self._taken(made, views)

    def of_weights(
        self,
        kernel: tvm.ir.GlobalVar,
        sources: Sequence[str],
        axes: Sequence[str],
        views: dict[relax.Var, tuple[str, str]],
    ) -> list[relax.Var]:
        """What a kernel makes of tensors together, and of coordinates, as parameters, which are put among others."""
        func, packer = self.module[kernel], self._calling(kernel)
        outs = [func.params[at] for at in sorted(_written(func))]
        of = ", ".join((*sources, *axes))
        names = [f"{of} by {packer}{f'_{at}' if at else ''}" for at in range(len(outs))]
        made = tuple(Placed(own, tuple(map(int, out.shape)), str(out.dtype), ()) for own, out in zip(names, outs))
        key = packer, *sources, *axes
        self.made[key] = Pack(packer, tuple(sources), tuple(axes), made)
        return self._taken(made, views)

    @staticmethod
    def _taken(made: Sequence[Placed], views: dict[relax.Var, tuple[str, str]]) -> list[relax.Var]:
        known = {view: var for var, view in views.items()}
        found = []
        for placed in made:
            view = placed.name, SLAB
            var = known.get(view)
            if var is None:  # an expression has no truth value
                var = relax.Var("packed", relax.TensorType(list(placed.shape), placed.dtype))
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
        name = self._calling(self.added(func, "pack"))
        same.append((func, name))
        return name

    def _calling(self, kernel: tvm.ir.GlobalVar) -> str:
        """The function of the module that calls a kernel, with the same arguments."""
        name = f"axe_{kernel.name_hint}"
        if name not in [str(variable.name_hint) for variable in self.module.functions]:
            params = [_as_param(param) for param in self.module[kernel].params]
            builder = relax.BlockBuilder(self.module)
            with builder.function(name, params, pure=False):
                builder.emit(relax.Call(kernel, params))
                builder.emit_func_output(relax.Tuple([]))
            self.module = builder.get()
        return name


def _as_param(param: tirx.Var) -> relax.Var:
    """A parameter of a function of Relax in the place of a kernel's."""
    if not tirx.is_buffer_var(param):
        return relax.Var(str(param.name), tvm.ir.PrimType(str(param.ty.dtype)))
    return relax.Var(str(param.name), relax.TensorType(list(param.shape), str(param.dtype)))


def _is_kernel(value: relax.Expr) -> TypeGuard[relax.Call]:
    """Whether a value is a call of a kernel."""
    return isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.GlobalVar)


def _calls(func: relax.Function) -> Iterator[relax.Call]:
    """The calls of kernels."""
    for block in func.body.blocks:
        for binding in block.bindings:
            if _is_kernel(binding.value):
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
    gone: Collection[relax.Var] = (),
    read: Sequence[relax.Expr] = (),
) -> tuple[relax.Function, DeviceFunction]:
    """A function with other calls, and of its tensors those that are used, or that others leave.

    Bindings of the variables that are `gone` go, which `read` some of the tensors.
    """
    blocks, used = [], set[relax.Var]()
    for block in func.body.blocks:
        kept = [b for b in block.bindings if b.var not in gone]
        bindings = [relax.VarBinding(b.var, calls.get(b.value, b.value)) for b in kept]
        for binding in bindings:
            used.update(relax.analysis.free_vars(binding.value))
        blocks.append(type(block)(bindings))
    before = set(_views(func, function))
    given = [*read, *(arg for call in calls for arg in call.args)]
    replaced = {arg for arg in given if isinstance(arg, relax.Var) and arg in before}
    left = {var: view for var, view in views.items() if var in used or var not in replaced}
    first = function.numbers
    others = func.params[first + len(function.arguments) :]
    params = [*func.params[:first], *left, *others]
    body = relax.SeqExpr(blocks, func.body.body)
    rewritten = relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs)
    return rewritten, replace(function, arguments=tuple(left.values()))
