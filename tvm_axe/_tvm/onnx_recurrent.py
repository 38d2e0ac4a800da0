"""ONNX's recurrent layers of a known number of steps, written out step by step in operators of Relax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx
from tvm.relax import op

from tvm_axe._tvm.formulas import elu, number
from tvm_axe._tvm.onnx_call import Call

__all__ = ["gru", "lstm", "rnn"]

_Function = Callable[[Any], Any]
_ARGUMENTS: dict[str, tuple[float | None, ...]] = {
    "tanh": (), "sigmoid": (), "relu": (), "softsign": (), "softplus": (), "affine": (None, None),
    "leakyrelu": (0.01,), "thresholdedrelu": (1.0,), "scaledtanh": (None, None), "hardsigmoid": (0.2, 0.5),
    "elu": (1.0,),
}  # fmt: skip
"""The alpha and the beta of each activation where none are given: its operator's, if ONNX has one of that name."""


@dataclass(frozen=True)
class _Step:
    """What a cell makes a step's state from: its functions and what attributes say."""

    call: Call
    functions: Sequence[_Function]
    clip: float

    def bounded(self, x: Any) -> Any:
        return op.clip(x, -self.clip, self.clip) if self.clip else x

    def activated(self, which: int, x: Any) -> Any:
        return self.call.emit(self.functions[which](self.call.emit(self.bounded(x))))


@dataclass(frozen=True)
class _Weights:
    """A direction's: what states are multiplied with, [hidden, gates * hidden] or in parts of columns, and more.

    The bias [gates * hidden] is of products of states alone, where it isn't added ahead of the steps; peepholes are
    [3 * hidden].
    """

    recurrent: list[Any]
    bias: Any
    peepholes: Any


_Cell = Callable[[_Step, _Weights, Any, list[Any]], list[Any]]


def lstm(
    call: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, initial_h: Any = None,
    initial_c: Any = None, peepholes: Any = None, *, input_forget: int = 0, **attributes: Any,
) -> Any:  # fmt: skip
    """ONNX's LSTM: gates in the order input, output, forget, cell; peepholes in the order input, output, forget."""

    def cell(step: _Step, weights: _Weights, given: Any, states: list[Any]) -> list[Any]:
        (h, c), emit = states, call.emit
        parts = _parts(call, op.add(given, op.matmul(h, weights.recurrent[0])), 4)
        seen = [None] * 3 if weights.peepholes is None else _parts(call, weights.peepholes, 3)

        def gate(at: int, state: Any) -> Any:
            return step.activated(0, parts[at] if seen[at] is None else op.add(parts[at], op.multiply(seen[at], state)))

        entering = gate(0, c)
        kept = emit(op.subtract(number(1, entering), entering)) if input_forget else gate(2, c)
        candidate = step.activated(1, parts[3])
        c = emit(op.add(op.multiply(kept, c), op.multiply(entering, candidate)))
        return [emit(op.multiply(gate(1, c), step.functions[2](c))), c]

    defaults = ("Sigmoid", "Tanh", "Tanh")
    return _layer(call, cell, 4, defaults, x, w, r, b, lengths, [initial_h, initial_c], peepholes, **attributes)


def gru(
    call: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, initial_h: Any = None, *,
    linear_before_reset: int = 0, **attributes: Any,
) -> Any:  # fmt: skip
    """ONNX's GRU: gates in the order update, reset, hidden."""

    size, apart = int(r.ty.shape[-1]), bool(linear_before_reset)

    def cell(step: _Step, weights: _Weights, given: Any, states: list[Any]) -> list[Any]:
        (h,), emit = states, call.emit
        product = emit(op.matmul(h, weights.recurrent[0]))
        product = product if weights.bias is None else emit(op.add(product, weights.bias))
        gates = emit(op.add(_columns(call, given, 0, 2 * size), _columns(call, product, 0, 2 * size)))
        update, reset = _parts(call, step.activated(0, gates), 2)
        if apart:
            hidden = op.multiply(reset, _columns(call, product, 2 * size, 3 * size))
        else:
            hidden = op.matmul(emit(op.multiply(reset, h)), weights.recurrent[1])
        candidate = step.activated(1, op.add(_columns(call, given, 2 * size, 3 * size), hidden))
        return [emit(op.add(op.multiply(op.subtract(number(1, h), update), candidate), op.multiply(update, h)))]

    return _layer(
        call, cell, 3, ("Sigmoid", "Tanh"), x, w, r, b, lengths, [initial_h], None,
        cut=None if apart else 2 * size, apart=apart, **attributes,
    )  # fmt: skip


def rnn(
    call: Call, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, initial_h: Any = None, **attributes: Any
) -> Any:
    """ONNX's RNN, of one gate."""

    def cell(step: _Step, weights: _Weights, given: Any, states: list[Any]) -> list[Any]:
        return [step.activated(0, op.add(given, op.matmul(states[0], weights.recurrent[0])))]

    return _layer(call, cell, 1, ("Tanh",), x, w, r, b, lengths, [initial_h], None, **attributes)


def _layer(
    call: Call, cell: _Cell, gates: int, defaults: Sequence[str], x: Any, w: Any, r: Any, b: Any, lengths: Any,
    initial: Sequence[Any], peepholes: Any, *, cut: int | None = None, apart: bool = False,
    activations: Sequence[str] | None = None, activation_alpha: Sequence[float] = (),
    activation_beta: Sequence[float] = (), clip: float = 0.0, direction: str = "forward",
    hidden_size: int | None = None, layout: int = 0,
) -> Any:  # fmt: skip
    """All directions of a layer: every step's outputs, and the last states, as the node asks for them.

    The products of all steps' inputs are one matmul ahead of the steps. A sequence that is over keeps its states, also
    ahead of its first step in reverse, so that it runs from its own end.
    """
    emit, x = call.emit, x if not layout else call.emit(op.permute_dims(x, [1, 0, 2]))
    steps, batch, width = x.ty.shape
    if not isinstance(steps, tirx.IntImm):
        raise call.refused(
            f"it runs {steps} steps, and is written out step by step",
            "give the input a known number of steps, by `shape_dict` or when the model is exported",
        )
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    hidden, dtype = int(r.ty.shape[-1]), str(x.ty.dtype)
    if hidden_size not in (None, hidden):
        raise call.refused(f"hidden_size is {hidden_size}, and weights have {hidden}", "export the model anew")
    named = [each if isinstance(each, str) else each.decode() for each in activations or [*defaults] * len(directions)]
    functions = _functions(call, named, activation_alpha, activation_beta)
    if len(functions) != len(defaults) * len(directions):
        raise call.refused(f"it has {len(functions)} activations", f"give {len(defaults)} for each direction")
    alive = _alive(call, lengths, int(steps))
    flat = emit(op.reshape(x, (steps * batch, width)))
    zero = emit(op.zeros((batch, hidden), dtype))
    outputs, lasts = [], []
    for at, turned in enumerate(directions):
        states = [zero if each is None else _one(call, each, at, layout) for each in initial]
        given = emit(op.matmul(flat, emit(op.permute_dims(_one(call, w, at)))))
        recurrent_bias = None
        if b is not None:
            biases = _parts(call, _one(call, b, at), 2)
            given = emit(op.add(given, biases[0] if apart else emit(op.add(*biases))))
            recurrent_bias = biases[1] if apart else None
        given = emit(op.reshape(given, (steps, batch, gates * hidden)))
        across = emit(op.permute_dims(_one(call, r, at)))
        recurrent = [across] if cut is None else [
            _columns(call, across, 0, cut), _columns(call, across, cut, gates * hidden)
        ]  # fmt: skip
        weights = _Weights(recurrent, recurrent_bias, None if peepholes is None else _one(call, peepholes, at))
        step = _Step(call, functions[at * len(defaults) :][: len(defaults)], clip)
        made = [zero] * int(steps)
        for time in reversed(range(int(steps))) if turned else range(int(steps)):
            after = cell(step, weights, _one(call, given, time), states)
            made[time] = after[0]
            if alive[time] is not None:
                made[time] = emit(op.where(alive[time], after[0], zero))
                after = [emit(op.where(alive[time], new, old)) for new, old in zip(after, states)]
            states = after
        if alive[0] is not None:  # of a sequence without steps ONNX Runtime gives zeros
            states = [emit(op.where(alive[0], each, zero)) for each in states]
        outputs.append(emit(op.stack(made, 1 if layout else 0)))
        lasts.append(states)
    results = [emit(op.stack(outputs, 2 if layout else 1))]
    results += [emit(op.stack(list(each), 1 if layout else 0)) for each in zip(*lasts)]
    return relax.Tuple(results[: call.results]) if call.results > 1 else results[0]


def _alive(call: Call, lengths: Any, steps: int) -> list[Any]:
    """Whether sequences [batch, 1] have each step, or None where all have it."""
    if lengths is None:
        return [None] * steps
    known = call.known(lengths)
    if known is not None:
        return [None if (known > at).all() else relax.const((known > at).reshape(-1, 1), "bool") for at in range(steps)]
    column = call.emit(op.expand_dims(lengths, 1))
    return [call.emit(op.greater(column, number(at, column))) for at in range(steps)]


def _one(call: Call, value: Any, at: int, axis: int = 0) -> Any:
    """What lies at one place of a dimension."""
    taken = value
    if not isinstance(value.ty.shape[axis], tirx.IntImm) or int(value.ty.shape[axis]) != 1:
        taken = call.emit(op.strided_slice(value, [axis], [at], [at + 1]))
    return call.emit(op.squeeze(taken, [axis]))


def _columns(call: Call, value: Any, first: int, last: int) -> Any:
    return call.emit(op.strided_slice(value, [len(value.ty.shape) - 1], [first], [last]))


def _parts(call: Call, value: Any, count: int) -> list[Any]:
    """Equal parts of the last dimension."""
    value = call.emit(value)
    size = int(value.ty.shape[-1]) // count
    return [_columns(call, value, at * size, (at + 1) * size) for at in range(count)]


# ---- Activations


def _functions(call: Call, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[_Function]:
    """Activations by their names; those that have an alpha or a beta take the next that is given."""
    made, given = [], [[*alphas], [*betas]]
    for name in names:
        defaults = _ARGUMENTS.get(name.lower())
        if defaults is None:
            raise call.refused(f"{name} isn't an activation of ONNX", "take one of the specification")
        arguments = [rest.pop(0) if rest else default for rest, default in zip(given, defaults)]
        told = [each for each in arguments if each is not None]
        if len(told) < len(arguments):
            raise call.refused(f"{name} has no alpha or no beta by itself", "give activation_alpha and activation_beta")
        made.append(_function(call, name.lower(), *told))
    return made


def _like(made: Any, x: Any) -> Any:
    return made if str(made.ty.dtype) == str(x.ty.dtype) else op.astype(made, str(x.ty.dtype))


def _function(call: Call, name: str, alpha: float = 0.0, beta: float = 0.0) -> _Function:
    emit, upstream = call.emit, call.upstream

    def line(x: Any) -> Any:
        return op.add(op.multiply(x, number(alpha, x)), number(beta, x))

    return {
        "tanh": op.tanh,
        "sigmoid": op.sigmoid,
        "relu": op.nn.relu,
        "affine": line,
        "leakyrelu": lambda x: op.nn.leakyrelu(x, alpha),
        "thresholdedrelu": lambda x: op.where(op.greater(x, number(alpha, x)), x, number(0, x)),
        "scaledtanh": lambda x: op.multiply(number(alpha, x), op.tanh(op.multiply(x, number(beta, x)))),
        "hardsigmoid": lambda x: op.clip(emit(line(x)), 0, 1),
        "elu": lambda x: _like(emit(elu(emit, x, alpha, 1.0, 1.0)), x),
        "softsign": lambda x: op.divide(x, op.add(op.abs(x), number(1, x))),
        "softplus": lambda x: upstream("Softplus", [x]),
    }[name]
