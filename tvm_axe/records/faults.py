"""What is wrong with a line of a database, said before upstream reads it, which would follow whatever stands there.

>>> workload_fault('["1", "bm90IGEgZnVuY3Rpb24="]')
'function: its header gives 8459484551590473582 bytes, and there are 6'
>>> entry_fault("[0, [[[], []], [0.25], 7, []]]")
'target: 7 is no object'
>>> entry_fault('[0, [[[["Fuse", ["l1", 7], [1], ["l2"]]], []], [0.25], {"kind": "llvm"}, []]]')
'trace: instruction 0 ("Fuse"): inputs[1]: 7 is the name of no value'

Upstream's parsers check less than they rely on: one byte of a line can end the process. A line without a fault may
still: so those that aren't known are tried in another process.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

from tvm_axe.records.expressions import check_function
from tvm_axe.records.graph import Wrong, is_dtype, parse_graph, short, strict_json
from tvm_axe.records.traces import check_trace

__all__ = ["entry_fault", "workload_fault"]

_HEADER = 8  # bytes before the JSON of a function: its length, little-endian


def workload_fault(line: str) -> str | None:
    """What is wrong with a line ``["hash", "function, encoded"]``, and where; None if nothing is."""
    try:
        _check_workload(strict_json(line))
    except Wrong as error:
        return str(error)
    return None


def entry_fault(line: str) -> str | None:
    """What is wrong with a line ``[n, [trace, run_secs, target, args]]``, and where; None if nothing is."""
    try:
        _check_entry(strict_json(line))
    except Wrong as error:
        return str(error)
    return None


def _check_workload(pair: Any) -> None:
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
        raise Wrong("isn't a list of a hash and an encoded function")
    digest, encoded = pair
    if not (digest.isascii() and digest.isdecimal() and len(digest) <= 20 and int(digest) < 2**64):
        raise Wrong(f"hash: {short(digest)} isn't a 64-bit number")
    try:
        raw = base64.b64decode(encoded, validate=True)
        if base64.b64encode(raw).decode() != encoded:
            raise Wrong("function: isn't base64 as it is written")
    except (binascii.Error, ValueError) as error:
        raise Wrong(f"function: isn't base64: {error}") from error
    length, text = int.from_bytes(raw[:_HEADER], "little"), raw[_HEADER:]
    if length != len(text):
        raise Wrong(f"function: its header gives {length} bytes, and there are {len(text)}")
    try:
        check_function(parse_graph(text.decode()))
    except UnicodeDecodeError as error:
        raise Wrong(f"function: {error}") from error
    except Wrong as error:
        raise Wrong(f"function: {error}") from error


def _check_entry(line: Any) -> None:
    if not isinstance(line, list) or len(line) != 2 or not isinstance(line[1], list) or len(line[1]) != 4:
        raise Wrong("isn't a workload's number and a list of trace, run_secs, target and args")
    number, (trace, run_secs, target, args) = line
    if type(number) is not int or number < 0:
        raise Wrong(f"workload: {short(number)} is no line's number")
    if not isinstance(trace, list) or len(trace) != 2:
        raise Wrong("trace: isn't a list of instructions and decisions")
    try:
        check_trace(*trace)
    except Wrong as error:
        raise Wrong(f"trace: {error}") from error
    _check_seconds(run_secs)
    if not isinstance(target, dict):
        raise Wrong(f"target: {short(target)} is no object")
    if not isinstance(args, list):
        raise Wrong(f"args: {short(args)} is no list")
    for at, info in enumerate(args):
        _check_argument(info, f"args[{at}]")


def _check_seconds(run_secs: Any) -> None:
    if not isinstance(run_secs, list) or not run_secs:
        raise Wrong(f"run_secs: {short(run_secs)} isn't a list of times")
    for second in run_secs:
        if type(second) not in (int, float) or not math.isfinite(second) or second < 0:
            raise Wrong(f"run_secs: {short(second)} is no time")


def _check_argument(info: Any, where: str) -> None:
    if not isinstance(info, list) or not info or not isinstance(info[0], str):
        raise Wrong(f"{where}: {short(info)} isn't a list that says what it is first")
    if info[0] != "TENSOR":
        return  # another sort, of which upstream says by an exception whether it knows it
    if len(info) != 3:
        raise Wrong(f"{where}: {short(info)} isn't TENSOR, a dtype and a shape")
    _, dtype, shape = info
    if not isinstance(dtype, str) or not is_dtype(dtype):
        raise Wrong(f"{where}: {short(dtype)} is no dtype")
    whole = isinstance(shape, list) and all(type(extent) is int and 0 <= extent < 2**40 for extent in shape)
    if not whole:
        raise Wrong(f"{where}: {short(shape)} is no shape")
