"""Tile programs as operators of PyTorch: they allocate what they give, have gradients, and torch.compile keeps them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import tirx

from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import kinds_by_device
from tvm_axe.tile.arguments import Parameter, Scalar, parameters
from tvm_axe.tile.build import compile_all
from tvm_axe.tile.executables import TileExecutable
from tvm_axe.tile.given import number_of
from tvm_axe.tile.lowering import Written
from tvm_axe.tile.program import TileProgram, TileSequence
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.strides import reach
from tvm_axe.tile.walking import variables_in

Programs: TypeAlias = Written | Sequence[Written]
"""A tile program, or several that run one after the other, in which tensors of one name are one."""

_ALIGNED = 64  # bytes, of which tensors that a program is called with begin at a multiple on every target


def operator(
    name: str, programs: Programs, *, outputs: Sequence[str] | None = None, gradient: Programs | None = None
) -> Any:
    """Make an operator of PyTorch of a tile program: ``y = operator("mine::scale", scale)(x)``.

    It is called with the tensors that the program reads, and its numbers, in the order of its parameters, and returns
    new ones that it writes: one, or a tuple in that order. A program is compiled at the first call for a device, CPU or
    GPU, and runs on PyTorch's current stream. The operator is PyTorch's own (``torch.ops.mine.scale``), so it works
    under ``torch.compile``, in exported programs and with ``torch.library.opcheck``.

    Tensors that aren't dense are copied, but for parameters with strides (`tvm_axe.tile.strides`), whose tensors have
    these; results of such parameters have their strides, too.

    Several programs are one operator: what one leaves for the next is scratch. For a kernel of `tvm_axe.tile.kernels`
    give its recipe's ``programs`` and ``outputs``. A function of several kernels is one program.

    Parameters
    ----------
    name : str
        ``"namespace::name"``, which isn't taken yet.
    programs : PrimFunc, TileProgram, TileSequence or sequence of them
        What is computed. No tensor is both read and written by one of them.
    outputs : sequence of str, optional
        What is returned, by name: those tensors that are written and that no later program reads, if left out.
    gradient : PrimFunc, TileProgram, TileSequence or sequence of them, optional
        What computes the gradients, in terms of names: it may read the operator's inputs and outputs and, for an output
        ``Y``, the gradient ``dY`` of a loss by it; it gives ``dX`` for an input ``X``. It is the operator
        ``"namespace::name_gradient"``.

    Returns
    -------
    torch.library.CustomOpDef
        The operator.

    Raises
    ------
    InputError
        PyTorch isn't installed, or the name is none or taken. Of a call: a tensor is on a device that nothing compiles
        for, an argument doesn't fit, or the gradient of an input is asked for that `gradient` doesn't give.
    TileError
        A program is malformed or writes what it reads, a size of an output is none of the inputs', or `gradient` reads
        or gives what it can't.

    Examples
    --------
    >>> import torch
    >>> from tvm.script import tirx as T
    >>> from tvm_axe import tile
    >>> @T.prim_func
    ... def square(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
    ...     with tile.kernel(1), tile.parallel(64) as i:
    ...         Y[i] = X[i] * X[i]
    >>> @T.prim_func
    ... def gradient(X: T.Buffer((64,), "float32"), dY: T.Buffer((64,), "float32"), dX: T.Buffer((64,), "float32")):
    ...     with tile.kernel(1), tile.parallel(64) as i:
    ...         dX[i] = dY[i] * X[i] * 2.0
    >>> squared = operator("mine::square", square, gradient=gradient)
    >>> x = torch.full((64,), 3.0, requires_grad=True)
    >>> squared(x).sum().backward()
    >>> squared(x)[0].item(), x.grad[0].item()
    (9.0, 6.0)
    """
    try:
        import torch
    except ImportError as error:
        raise InputError("operator: PyTorch isn't installed; pip install torch") from error
    made = _Operator(name, programs, outputs)
    back = None if gradient is None else _Operator(f"{name}_gradient", gradient, None)
    if back is not None:
        _check_gradient(made, back)
    if name.count("::") != 1 or not all(part.isidentifier() for part in name.split("::")):
        raise InputError(f'operator: a name is "namespace::name", got {name!r}')
    for each in (made, *([back] if back else [])):
        namespace, short = each.name.split("::")
        if hasattr(getattr(torch.ops, namespace), short):
            raise InputError(f"operator: {each.name} is taken; valid is a name that no operator has")
    defined = _define(made)
    if back is not None:
        gradients = _Gradient(made, back, _define(back))
        defined.register_autograd(gradients.backward, setup_context=gradients.keep)
    return defined


def _define(made: _Operator) -> Any:
    """The operator, known to PyTorch: what it does, and what comes out without doing it."""
    import torch

    defined = torch.library.custom_op(made.name, made.run, mutates_args=(), schema=made.schema)
    defined.register_fake(made.allocated)
    return defined


class _Operator:
    """Programs that run one after the other, by the names of what they take and give.

    Attributes
    ----------
    taken : dict of str to Parameter or Scalar
        The arguments, in order.
    given : dict of str to Parameter
        The results, in order.
    """

    def __init__(self, name: str, programs: Programs, outputs: Sequence[str] | None) -> None:
        self.name = name
        several = [*programs] if isinstance(programs, Sequence) else [programs]
        self._programs = [read_function(each) if isinstance(each, tirx.PrimFunc) else each for each in several]
        self._own = [parameters(program) for program in self._programs]
        self._compiled: dict[str, list[TileExecutable]] = {}
        self._lock = threading.Lock()
        self.taken: dict[str, Parameter | Scalar] = {}
        self._written: dict[str, Parameter] = {}
        read_later: set[str] = set()
        for program, own in zip(self._programs, self._own):
            if program.devices > 1:
                raise TileError(f"operator: {program.name} is a program of a mesh, whose devices run it together")
            reads = _read(program)
            for param in own:
                if isinstance(param, Scalar):
                    self.taken.setdefault(param.name, param)
                    continue
                if param.name in reads and param.is_output:
                    raise TileError(
                        f"operator: {program.name} writes {param.name}, which it reads; an operator gives new tensors: "
                        "write to another parameter"
                    )
                if param.is_output and param.name in self.taken:
                    raise TileError(f"operator: {program.name} writes {param.name}, which a program before it reads")
                if param.is_output:
                    self._written.setdefault(param.name, param)
                elif param.name in self._written:
                    read_later.add(param.name)
                else:
                    self.taken.setdefault(param.name, param)
        last = [name for name in self._written if name not in read_later]
        missing = [output for output in outputs or () if output not in self._written]
        if missing:
            raise TileError(f"operator: nothing writes {', '.join(missing)}; written are {', '.join(self._written)}")
        self.given = {output: self._written[output] for output in (last if outputs is None else outputs)}
        if not self.given:
            raise TileError(f"operator: {name} writes nothing that it could give")
        self._check_sizes()

    def _check_sizes(self) -> None:
        known = {
            str(size.name)
            for param in self._tensors()
            for size in (*param.shape, *(param.strides or ()))
            if isinstance(size, tirx.Var)
        }
        for param in self._written.values():
            for size in (*param.shape, *(param.strides or ())):
                unknown = sorted({str(var.name) for var in variables_in(size)} - known)
                if unknown:
                    raise TileError(
                        f"operator: {', '.join(unknown)} of {param} is the size of no input, nor a stride, so nobody "
                        f"knows how large {param.name} is"
                    )

    def _tensors(self) -> Iterable[Parameter]:
        return (param for param in self.taken.values() if isinstance(param, Parameter))

    @property
    def schema(self) -> str:
        """What PyTorch asks how it is called."""
        kinds = [
            f"{'Tensor' if isinstance(param, Parameter) else 'float' if 'float' in param.dtype else 'int'} {name}"
            for name, param in self.taken.items()
        ]
        results = ", ".join("Tensor" for _ in self.given)
        return f"({', '.join(kinds)}) -> {f'({results})' if len(self.given) > 1 else results}"

    def run(self, *arguments: Any) -> Any:
        """New tensors, filled by the programs."""
        device = self._device(arguments)
        executables = self._executables(device)
        values = {name: _fitting(param, value) for (name, param), value in zip(self.taken.items(), arguments)}
        values |= self._new(self._written.values(), values, device)
        for executable, own in zip(executables, self._own):
            executable(*(values[param.name] for param in own))
        return self._results(values)

    def allocated(self, *arguments: Any) -> Any:
        """Tensors as `run` returns, with nothing in them."""
        values = dict(zip(self.taken, arguments))
        return self._results(self._new(self.given.values(), values, self._device(arguments)))

    def _results(self, values: Mapping[str, Any]) -> Any:
        found = tuple(values[name] for name in self.given)
        return found if len(found) > 1 else found[0]

    def _device(self, arguments: Sequence[Any]) -> Any:
        """The device of the tensors; which one, if they are on several, is told when the program is called."""
        devices = [value.device for value in arguments if hasattr(value, "device")]
        if not devices:
            raise InputError(f"{self.name}: takes no tensor, so it has no device")
        return devices[0]

    def _executables(self, device: Any) -> list[TileExecutable]:
        with self._lock:
            if device.type not in self._compiled:
                kinds = kinds_by_device()
                if device.type not in kinds:
                    raise InputError(f"{self.name}: tensors are on {device}; valid are {', '.join(kinds)}")
                self._compiled[device.type] = compile_all(self._programs, kinds[device.type])
            return self._compiled[device.type]

    def _new(self, params: Iterable[Parameter], values: Mapping[str, Any], device: Any) -> dict[str, Any]:
        """Tensors for parameters, as large as the inputs say."""
        import torch

        sizes: dict[str, Any] = {}
        for param in self._tensors():
            given = values[param.name].shape
            if len(given) != len(param.shape):
                raise InputError(f"{self.name}: {param.name} is {param}; got the shape {tuple(given)}")
            for own, extent in zip(param.shape, given):
                if isinstance(own, tirx.Var):
                    sizes.setdefault(str(own.name), extent)
        for param in self._tensors():
            for own, stride in zip(param.strides or (), values[param.name].stride() if param.strides else ()):
                if isinstance(own, tirx.Var):
                    sizes.setdefault(str(own.name), stride)
        found = {}
        for param in params:
            shape, options = [_size(extent, sizes) for extent in param.shape], {"device": device}
            options["dtype"] = getattr(torch, param.dtype)
            if param.strides is None:
                found[param.name] = torch.empty(shape, **options)
            else:
                strides = [_size(stride, sizes) for stride in param.strides]
                found[param.name] = torch.empty_strided(shape, strides, **options)
        return found


def _read(program: TileProgram | TileSequence) -> set[str]:
    """The tensors of which a program reads what they hold when it begins, by name."""
    found, written = set[str](), set[str]()
    for kernel in program.kernels:
        found |= {tile.name for node in kernel.nodes() for tile in node.reads} - written
        written |= {tile.name for node in kernel.nodes() for tile in node.writes}
    return found


def _check_gradient(forward: _Operator, gradient: _Operator) -> None:
    """Refuse gradients of what an operator doesn't take, or that read what nobody keeps."""
    known = {*forward.taken, *forward.given, *(f"d{name}" for name in forward.given)}
    unknown = [name for name in gradient.taken if name not in known]
    if unknown:
        raise TileError(f"operator: the gradient reads {', '.join(unknown)}; valid are {', '.join(sorted(known))}")
    inputs = [f"d{param.name}" for param in forward._tensors()]
    odd = [name for name in gradient.given if name not in inputs]
    if odd:
        raise TileError(f"operator: the gradient gives {', '.join(odd)}; valid are {', '.join(inputs)}")


@dataclass(frozen=True)
class _Gradient:
    """How an operator's gradients are computed: what is kept of a call, and what is made of it.

    Attributes
    ----------
    forward, operator : _Operator
        What is differentiated, and what computes its gradients.
    run : callable
        The latter, as PyTorch has it.
    """

    forward: _Operator
    operator: _Operator
    run: Callable[..., Any]

    def keep(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Of a call, what the gradient reads."""
        results = output if isinstance(output, tuple) else (output,)
        values = {**dict(zip(self.forward.taken, inputs)), **dict(zip(self.forward.given, results))}
        used = {name: values[name] for name in self.operator.taken if name in values}
        ctx.set_materialize_grads(False)
        ctx.like = {
            f"d{name}": (tuple(value.shape), value.dtype, value.device)
            for name, value in zip(self.forward.given, results)
        }
        ctx.names = [name for name, value in used.items() if hasattr(value, "device")]
        ctx.save_for_backward(*(used[name] for name in ctx.names))
        ctx.numbers = {name: value for name, value in used.items() if name not in ctx.names}

    def backward(self, ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """The gradients by the inputs, None where there is none."""
        for name, needed in zip(self.forward.taken, ctx.needs_input_grad):
            if needed and f"d{name}" not in self.operator.given:
                raise InputError(
                    f"{self.forward.name}: there is no gradient by {name}, {self.operator.name} gives "
                    f"{', '.join(self.operator.given)}; detach {name}, or have it computed"
                )
        values = {**ctx.numbers, **dict(zip(ctx.names, ctx.saved_tensors))}
        for (name, like), gradient in zip(ctx.like.items(), gradients):
            if gradient is not None and name not in self.operator.taken:
                raise InputError(
                    f"{self.forward.name}: {name[1:]} is differentiated, and {self.operator.name} doesn't read {name}; "
                    f"detach {name[1:]}"
                )
            values[name] = _zeros(*like) if gradient is None else gradient
        found = self.run(*(values[name] for name in self.operator.taken))
        given = dict(zip(self.operator.given, found if isinstance(found, tuple) else (found,)))
        return tuple(given.get(f"d{name}") for name in self.forward.taken)


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """The gradient by what nobody differentiates."""
    import torch

    return torch.zeros(shape, dtype=dtype, device=device)


def _fitting(param: Parameter | Scalar, value: Any) -> Any:
    """A tensor as programs take them: dense, but for one with strides, and aligned; anything else as it is."""
    if not hasattr(value, "contiguous"):
        return value
    if isinstance(param, Scalar) or param.strides is None:
        dense = value.contiguous()
        return dense.clone() if dense.data_ptr() % _ALIGNED else dense
    if value.data_ptr() % _ALIGNED == 0 or not value.numel():
        return value
    elements = reach(value.shape, value.stride()) + 1
    memory = value.as_strided((elements,), (1,), value.storage_offset()).clone()
    return memory.as_strided(value.shape, value.stride())


def _size(size: Any, sizes: Mapping[str, Any]) -> Any:
    """An extent or a stride as a number, of what the inputs say its variables are."""
    if isinstance(size, int):
        return size
    if isinstance(size, tirx.Var):
        return sizes[str(size.name)]
    return number_of(size, sizes)
