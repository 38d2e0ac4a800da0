"""ONNX's Loop and Scan of a known number of trips: the body once for each trip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, relax, tirx
from tvm.relax import op

from tvm_axe._tvm.onnx_call import Call

__all__ = ["loop", "scan"]

_MOST = 4096
"""How many trips are written out at the most: a model of more is one that nobody waits for."""


def loop(call: Call, count: Any = None, condition: Any = None, *carried: Any, body: Any) -> Any:
    """A Loop whose trip count is a constant, as is its condition, before the first trip and after each."""
    if count is None:
        raise call.refused("it runs until its condition is false", "give a trip count as an initializer")
    trips = int(call.constant(count, "trip count").reshape(()))
    going = condition is None or bool(call.constant(condition, "condition").reshape(()))
    states, stacked = [*carried], [[] for _ in range(len(body.output) - 1 - len(carried))]  # type: list[Any], list[Any]
    _check_carried(call, states)
    trip = 0
    while going and trip < trips:
        results = call.body(body, [relax.const(trip, "int64"), relax.const(True, "bool"), *states])
        known = call.known(results[0])
        if known is None:
            raise call.refused(
                "its condition is computed by the body, so that how often it runs becomes known with the data",
                "give a trip count, and a condition that is true and handed on",
            )
        going, trip = bool(known.reshape(())), trip + 1
        if going:
            _check_trips(call, trips)
        states = [_bound(call, each) for each in results[1 : 1 + len(states)]]
        for kept, each in zip(stacked, results[1 + len(states) :], strict=True):
            kept.append(_bound(call, each))
    return _results(call, [*states, *(_stacked(call, each, 0) for each in stacked)])


def scan(
    call: Call, *inputs: Any, body: Any, num_scan_inputs: int, scan_input_axes: Sequence[int] | None = None,
    scan_input_directions: Sequence[int] | None = None, scan_output_axes: Sequence[int] | None = None,
    scan_output_directions: Sequence[int] | None = None, directions: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """A Scan along dimensions of known extents; the first version's, whose inputs have a batch, for each sequence."""
    if len(inputs) == len(body.input):
        return _results(
            call,
            _scanned(
                call, inputs, body, num_scan_inputs, scan_input_axes, scan_input_directions, scan_output_axes,
                scan_output_directions,
            ),
        )  # fmt: skip
    lengths, *values = inputs
    if lengths is not None:
        raise call.refused("it has sequence_lens", "export the model for opset 9 or later")
    batch = _extent(call, values[0], 0, "sequences")
    each = [
        _scanned(call, [_place(call, value, at, 0) for value in values], body, num_scan_inputs, None, directions)
        for at in range(batch)
    ]
    return _results(call, [_stacked(call, list(several), 0) for several in zip(*each)])


def _scanned(
    call: Call, inputs: Sequence[Any], body: Any, count: int, axes: Sequence[int] | None,
    directions: Sequence[int] | None, out_axes: Sequence[int] | None = None,
    out_directions: Sequence[int] | None = None,
) -> list[Any]:  # fmt: skip
    states, scanned = [*inputs[: len(inputs) - count]], inputs[len(inputs) - count :]
    _check_carried(call, states)
    axes = [axis % len(each.ty.shape) for axis, each in zip(axes or [0] * count, scanned, strict=True)]
    extents = {_extent(call, each, axis, "steps") for each, axis in zip(scanned, axes)}
    if len(extents) != 1:
        raise call.refused(f"its inputs have {sorted(extents)} steps", "give all the same number")
    (trips,) = extents
    _check_trips(call, trips)
    outputs = len(body.output) - len(states)
    stacked: list[list[Any]] = [[] for _ in range(outputs)]
    for trip in range(trips):
        parts = [
            _place(call, each, trips - 1 - trip if turned else trip, axis)
            for each, axis, turned in zip(scanned, axes, directions or [0] * count, strict=True)
        ]
        results = [_bound(call, each) for each in call.body(body, [*states, *parts])]
        states = results[: len(states)]
        for kept, made in zip(stacked, results[len(states) :], strict=True):
            kept.append(made)
    return states + [
        _stacked(call, each[::-1] if turned else each, axis)
        for each, axis, turned in zip(
            stacked, out_axes or [0] * outputs, out_directions or [0] * outputs, strict=True
        )
    ]  # fmt: skip


def _extent(call: Call, value: Any, axis: int, what: str) -> int:
    extent = value.ty.shape[axis]
    if not isinstance(extent, tirx.IntImm):
        raise call.refused(
            f"it runs over {extent} {what}, and is written out one by one",
            f"give the input a known number of {what}, by `shape_dict` or when the model is exported",
        )
    return int(extent)


def _check_trips(call: Call, trips: int) -> None:
    if trips > _MOST:
        raise call.refused(
            f"it runs more than {_MOST} trips, and is written out one by one", "export the model for shorter inputs"
        )


def _check_carried(call: Call, states: Sequence[Any]) -> None:
    if any(not isinstance(each, relax.Expr) or isinstance(each.ty, relax.TupleType) for each in states):
        raise call.refused("it carries a sequence, or what may be none", "carry tensors")


def _bound(call: Call, value: Any) -> Any:
    """What is computed once, though it may be read often; constants stay constants."""
    return call.emit(value) if isinstance(value, ir.Call) else value


def _place(call: Call, value: Any, at: int, axis: int) -> Any:
    return call.emit(op.squeeze(call.emit(op.strided_slice(value, [axis], [at], [at + 1])), [axis]))


def _stacked(call: Call, values: list[Any], axis: int) -> Any:
    if not values:
        raise call.refused("it runs no trip, so that what it stacks has no shape", "leave it out")
    rank = len(values[0].ty.shape) + 1
    return call.emit(op.stack(values, axis % rank))


def _results(call: Call, made: Sequence[Any]) -> Any:
    return relax.Tuple(list(made)) if len(made) > 1 else made[0]
