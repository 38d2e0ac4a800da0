"""Rewriting what upstream's objects hold, by functions of Python that may raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm_ffi.structural import _normalize_callbacks

from tvm_axe.interrupts import uninterrupted


def structural_map(value: Any, callbacks: Any) -> Any:
    """Rewrite `value` as `tvm_ffi.structural_map` does, by callbacks that may raise.

    Upstream's frees what is still in use when an error leaves a callback, after another has returned a new object: the
    heap is broken, and the process ends some time later. So none leaves one: what a callback raises first is raised
    when the walk is done, as it was; and Ctrl-C's exception, which comes before a callback could catch it, waits too.
    """
    raised: list[BaseException] = []

    def caught(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(node: Any) -> Any:
            if raised:
                return node
            try:
                return callback(node)
            except BaseException as error:
                raised.append(error)
                return node

        return call

    entries = [(kind, caught(each)) for kind, each in _normalize_callbacks(callbacks, api_name="structural_map")]
    with uninterrupted():
        mapped = tvm_ffi.structural_map(value, entries)
    if raised:
        raise raised[0]
    return mapped
