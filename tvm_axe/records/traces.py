"""What a trace may hold: the instructions of stock schedules, and the decisions of those that sample."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm_axe import _tvm
from tvm_axe.records.expressions import check_nodes
from tvm_axe.records.graph import Wrong, parse_graph, short

__all__ = ["check_trace"]

_LARGEST = 2**40
_NAME = re.compile(r"[blv]\d{1,9}")


@dataclass(frozen=True)
class _Form:
    """What an instruction takes and gives: a letter for each value, and the types of its attributes.

    ``b`` is a block, ``l`` a loop, ``a`` either, ``e`` a number or one that is left to be found, ``x`` anything, ``B``
    a list of blocks; the last letter stands for any number of values where a ``*`` follows.
    """

    inputs: str
    attributes: str
    outputs: str


# Attributes: i a whole number, t a truth value, s a text, x anything.
_FORMS: Mapping[str, _Form] = {
    "SampleCategorical": _Form("", "xx", "v"),
    "SamplePerfectTile": _Form("l", "ii", "v*"),
    "SamplePartitionedTile": _Form("l", "iii", "v*"),
    "SampleComputeLocation": _Form("b", "", "l"),
    "GetSBlock": _Form("", "ss", "b"),
    "GetLoops": _Form("b", "", "l*"),
    "GetChildBlocks": _Form("a", "", "b*"),
    "GetProducers": _Form("b", "", "b*"),
    "GetConsumers": _Form("b", "", "b*"),
    "GetOutputBlocks": _Form("b", "", "b*"),
    "Merge": _Form("l*", "", "l"),
    "Fuse": _Form("l*", "t", "l"),
    "Split": _Form("le*", "tt", "l*"),
    "LoopPartition": _Form("le*", "t", "l*"),
    "Reorder": _Form("l*", "", ""),
    "ReorderBlockIterVar": _Form("b", "x", ""),
    "AddUnitLoop": _Form("a", "", "l"),
    "Parallel": _Form("l", "", ""),
    "Vectorize": _Form("l", "", ""),
    "Unroll": _Form("l", "", ""),
    "Bind": _Form("l", "s", ""),
    "CacheRead": _Form("bB", "is", "b"),
    "CacheWrite": _Form("bB", "is", "b"),
    "ComputeAt": _Form("bl", "ti", ""),
    "ReverseComputeAt": _Form("bl", "ti", ""),
    "ComputeInline": _Form("b", "", ""),
    "ReverseComputeInline": _Form("b", "", ""),
    "DecomposeReduction": _Form("bl", "", "b"),
    "DecomposePadding": _Form("bl", "", "b"),
    "RFactor": _Form("l", "i", "b"),
    "PadEinsum": _Form("b", "x", ""),
    "RollingBuffer": _Form("b", "i", ""),
    "StorageAlign": _Form("b", "iiii", ""),
    "SetScope": _Form("b", "is", ""),
    "UnsafeSetDType": _Form("b", "is", ""),
    "Annotate": _Form("ax", "s", ""),
    "Unannotate": _Form("a", "s", ""),
    "EnterPostproc": _Form("", "", ""),
}
"""Instructions that aren't here are checked as far as their names and values go."""


def check_trace(instructions: Any, decisions: Any) -> None:
    """Check a trace as the file has it.

    Raises
    ------
    Wrong
        If it isn't one.
    """
    if not isinstance(instructions, list) or not isinstance(decisions, list):
        raise Wrong("the trace isn't two lists, of instructions and of decisions")
    chosen: dict[int, Any] = {}
    for at, decision in enumerate(decisions):
        paired = isinstance(decision, list) and len(decision) == 2 and type(decision[0]) is int
        if not paired or not 0 <= decision[0] < len(instructions) or decision[0] in chosen:
            raise Wrong(f"decision {at}: {short(decision)} isn't the number of an instruction and what it chose")
        chosen[decision[0]] = decision[1]
    made: set[str] = set()
    for number, instruction in enumerate(instructions):
        try:
            name, outputs = _check_instruction(instruction, made)
            if number in chosen:
                _check_decision(name, instruction, outputs, chosen[number])
        except Wrong as error:
            said = f" ({short(instruction[0])})" if isinstance(instruction, list) and instruction else ""
            raise Wrong(f"instruction {number}{said}: {error}") from error
        made.update(outputs)


def _check_instruction(instruction: Any, made: set[str]) -> tuple[str, list[str]]:
    if not isinstance(instruction, list) or len(instruction) != 4:
        raise Wrong(f"{short(instruction)} isn't a name, inputs, attributes and outputs")
    name, inputs, attributes, outputs = instruction
    if not isinstance(name, str) or not _tvm.is_instruction(name):
        raise Wrong("there is no such instruction")
    for part, values in (("inputs", inputs), ("attributes", attributes), ("outputs", outputs)):
        if not isinstance(values, list):
            raise Wrong(f"{part}: {short(values)} is no list")
    form = _FORMS.get(name)
    kinds = _letters(form.inputs if form else "x*", len(inputs), "inputs")
    for at, (kind, value) in enumerate(zip(kinds, inputs)):
        _check_input(kind, value, f"inputs[{at}]")
    if form:
        kinds = _letters(form.attributes, len(attributes), "attributes")
        for at, (kind, value) in enumerate(zip(kinds, attributes)):
            _check_attribute(kind, value, f"attributes[{at}]")
    for value in attributes:
        if isinstance(value, str) and value.startswith('{"root_index"'):
            check_nodes(parse_graph(value))
    kinds = _letters(form.outputs if form else "x*", len(outputs), "outputs")
    for at, (kind, value) in enumerate(zip(kinds, outputs)):
        fresh = isinstance(value, str) and _NAME.fullmatch(value) and value not in made
        if not fresh or kind not in ("x", value[0]) or value in outputs[:at]:
            raise Wrong(f"outputs[{at}]: {short(value)} isn't a new name of what it gives")
    if name in ("Split", "LoopPartition", "SamplePerfectTile"):
        count = attributes[0] if name == "SamplePerfectTile" else len(inputs) - 1
        if count != len(outputs) or not outputs:
            raise Wrong(f"gives {len(outputs)} values, not {count}")
    if name == "SamplePerfectTile" and attributes[1] < 1:
        raise Wrong(f"attributes[1]: {attributes[1]} isn't positive")
    if name == "SampleCategorical":
        _check_candidates(*attributes)
    return name, outputs


def _letters(form: str, count: int, what: str) -> str:
    if form.endswith("*"):
        fixed = form[:-2]
        if count >= len(fixed):
            return fixed + form[-2] * (count - len(fixed))
    elif count == len(form):
        return form
    raise Wrong(f"has {count} {what}")


def _check_input(kind: str, value: Any, where: str) -> None:
    if kind == "B":
        if not isinstance(value, list):
            raise Wrong(f"{where}: {short(value)} is no list of blocks")
        for item in value:
            _check_input("b", item, where)
    elif isinstance(value, str) and not (value.startswith('"') and value.endswith('"') and len(value) > 1):
        if value == "None" and kind in "ex":
            return
        if _NAME.fullmatch(value):  # whether it was given before, upstream looks itself
            if value[0] in {"a": "bl", "e": "v", "x": "blv"}.get(kind, kind):
                return
            raise Wrong(f"{where}: {short(value)} is of another sort than it takes")
        if value.startswith("{") and kind == "x":  # a map of indices, say, which is encoded as functions are
            check_nodes(parse_graph(value))
            return
        raise Wrong(f"{where}: {short(value)} is the name of no value")
    elif kind == "e":
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise Wrong(f"{where}: {short(value)} is no extent")
    elif kind != "x":
        raise Wrong(f"{where}: {short(value)} is the name of no value")
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _check_input("x", item, where)
    elif value is None:
        raise Wrong(f"{where}: null is no value")


def _check_attribute(kind: str, value: Any, where: str) -> None:
    match kind:
        case "i":
            valid = type(value) is int and -1 <= value <= _LARGEST
        case "t":
            valid = value in (0, 1) and isinstance(value, int)
        case "s":
            valid = isinstance(value, str)
        case _:
            valid = isinstance(value, list) or value is not None
    if not valid:
        raise Wrong(f"{where}: {short(value)} isn't {_KINDS[kind]}")


_KINDS = {"i": "a whole number in range", "t": "a truth value", "s": "a text", "x": "a value"}


def _check_candidates(candidates: Any, probabilities: Any) -> None:
    whole = isinstance(candidates, list) and all(type(c) is int and abs(c) <= _LARGEST for c in candidates)
    if not whole or not candidates:
        raise Wrong(f"attributes[0]: {short(candidates)} isn't a list of whole numbers")
    real = isinstance(probabilities, list) and all(
        type(p) in (int, float) and 0 <= p <= 1.000001 for p in probabilities
    )
    if not real or len(probabilities) != len(candidates) or sum(probabilities) <= 0:
        raise Wrong(f"attributes[1]: {short(probabilities)} isn't a probability for each candidate")


def _check_decision(name: str, instruction: list[Any], outputs: list[str], decision: Any) -> None:
    match name:
        case "SampleCategorical":
            count = len(instruction[2][0])
            if type(decision) is not int or not 0 <= decision < count:
                raise Wrong(f"decision: {short(decision)} is none of its {count} candidates")
        case "SamplePerfectTile" | "SamplePartitionedTile":
            whole = isinstance(decision, list) and all(type(f) is int and 0 < f <= _LARGEST for f in decision)
            if not whole or len(decision) != len(outputs):
                raise Wrong(f"decision: {short(decision)} isn't {len(outputs)} positive factors")
            if prod(decision) > _LARGEST:
                raise Wrong(f"decision: {short(decision)} has a product that no loop has")
        case "SampleComputeLocation":
            if type(decision) is not int or not -2 <= decision < 1000:
                raise Wrong(f"decision: {short(decision)} is no place among loops")
        case _:
            pass  # upstream says by an exception that it chooses nothing, so the schedule refuses the record
