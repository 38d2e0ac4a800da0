"""What is known of a shared model, in what JSON can hold: dataclasses by name, and nothing that Python would run.

>>> from tvm_axe.layout.shares import Share
>>> form = Form(0, Share.blocks(8, 2))
>>> print(decoded(json.loads(json.dumps(encoded(form)))))
S0[4@0 4@1]
"""

from __future__ import annotations

import json  # noqa: F401  (the example's)
from dataclasses import fields, is_dataclass
from typing import Any

import tvm

from tvm_axe.layout.shares import Run, Share
from tvm_axe.relax.device import Argument, Pack, Placed
from tvm_axe.relax.forms import Form
from tvm_axe.relax.sizes import Extent

__all__ = ["decoded", "encoded"]

_KINDS = {kind.__name__: kind for kind in (Argument, Form, Pack, Placed, Run, Share)}
_KIND, _EXTENT = "is", Extent.__name__


def encoded(value: Any) -> Any:
    """A value of dataclasses, tuples, strings and numbers, as JSON can hold it."""
    if isinstance(value, Extent):
        return {_KIND: _EXTENT, "expr": tvm.ir.save_json(value.expr)}
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        assert kind in _KINDS, kind
        return {_KIND: kind} | {each.name: encoded(getattr(value, each.name)) for each in fields(value) if each.init}
    return [encoded(each) for each in value] if isinstance(value, tuple | list) else value


def decoded(data: Any) -> Any:
    """The value again, of what JSON has made of it; sequences are tuples."""
    if isinstance(data, dict) and data[_KIND] == _EXTENT:
        return Extent.of(tvm.ir.load_json(data["expr"]))
    if isinstance(data, dict):
        return _KINDS[data[_KIND]](**{name: decoded(each) for name, each in data.items() if name != _KIND})
    return tuple(map(decoded, data)) if isinstance(data, list) else data
