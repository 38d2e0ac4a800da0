"""Objects that programs leave on workers: each has its own, and lets go of it when it is told to."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_axe.collective import WorkerError, Workers, objects
from tvm_axe.errors import InputError


@I.ir_module
class Keeping:
    """A tensor of numbers as an object: made by one function, and kept again in another place by another."""

    @R.function(pure=False)
    def make(number: R.Prim("int64"), x: R.Tensor((3,), "float32")) -> R.Tuple:
        R.call_packed("axe.keep", number, x, ty_args=(R.Tuple,))
        return R.tuple()

    @R.function(pure=False)
    def again(number: R.Prim("int64"), other: R.Prim("int64")) -> R.Tuple:
        x: R.Any = R.call_packed("axe.kept", number, ty_args=(R.Any,))
        R.call_packed("axe.keep", other, x, ty_args=(R.Tuple,))
        return R.tuple()


def test_objects_stay_until_they_are_freed(workers: Workers) -> None:
    x = workers.mesh_tensor((3,), "float32")
    first, second = workers.place(), workers.place()
    program = workers.load(Keeping, workers.target)
    with pytest.raises(WorkerError, match=f"no program has kept an object {first.number} on this worker"):
        workers.call(program, [first.number, second.number], "again")
    workers.call(program, [first.number, (x, "slab")], "make")
    workers.call(program, [first.number, second.number], "again")
    workers.free(first)
    with pytest.raises(InputError, match=r"DeviceObject\(\d+\) is no object of these workers"):
        workers.apply("runtime.GetGlobalFunc", [first])
    with pytest.raises(WorkerError, match="no program has kept"):
        workers.call(program, [first.number, second.number], "again")
    workers.call(program, [second.number, second.number], "again")
    workers.discard(second)
    workers.free_discarded()
    with pytest.raises(WorkerError, match="no program has kept"):
        workers.call(program, [second.number, second.number], "again")


@pytest.mark.parametrize("result", [3, 2.5, None, True])
def test_numbers_come_back(result: float | None) -> None:
    seen = []

    def called(*given: object) -> float | None:
        seen.append(given)
        return result

    tvm.register_global_func("tests.called", called, override=True)
    found, answer = objects.Objects(), np.zeros(objects.ANSWER, "uint8")
    found.keep(4, tvm_ffi.Shape([7]))
    said = json.loads(json.dumps([[4], {"is": (1, 2)}, {"is": "text"}, {"is": 0.5}, {"is": None}]))
    found.apply("tests.called", said, answer)
    ((kept, shape, *others),) = seen
    assert objects.answered(answer) == result
    assert list(kept) == [7] and list(shape) == [1, 2] and others == ["text", 0.5, None]


def test_anything_else_is_refused() -> None:
    tvm.register_global_func("tests.told", lambda: "text", override=True)
    found, answer = objects.Objects(), np.zeros(objects.ANSWER, "uint8")
    with pytest.raises(TypeError, match=r"tests\.told returned a str; only numbers come back"):
        found.apply("tests.told", [], answer)
    with pytest.raises(KeyError, match=r"the runtime has no function 'tests\.nothing'"):
        found.apply("tests.nothing", [], answer)
