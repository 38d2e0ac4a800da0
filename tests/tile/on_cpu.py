"""Tile programs lowered for this machine's CPU, and their judge: the interpreter in float64."""

import numpy as np
import tvm
from interpreter import interpret

from tvm_axe.machines.target import resolve_target
from tvm_axe.tile import read
from tvm_axe.tile.targets import llvm as cpu

EPSILONS = {
    "float64": 1e-13,
    "float32": 1e-5,
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float8_e4m3fn": 7e-2,
    "float8_e5m2": 0.13,
}
"""How far off a result may be, relative to the largest one: some roundings of the type that it is stored in."""


def target(mcpu=None):
    """This machine's CPU, or another whose instructions it has."""
    return resolve_target({"kind": "llvm", **({"mcpu": mcpu} if mcpu else {})}, threads=2)


def aligned(array):
    """A copy at an address that vectors may be stored at."""
    memory = np.empty(array.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    out = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def run(func, *arrays, mcpu=None, check_bounds=False):
    """What each parameter holds after a run on copies of the arrays."""
    from tvm_axe import _tvm

    lowered = cpu.lower(cpu.decide(read(func), target(mcpu)), check_bounds=check_bounds)
    compiled = tvm.compile(lowered, target=target(mcpu))
    copies = [aligned(array) for array in arrays]
    compiled[str(lowered.attrs["global_symbol"])](*(_tvm.as_tensor(array) for array in copies))
    return copies


def agree(func, *arrays, mcpu=None, epsilon=None, bounds=(False, True)):
    """Run the program, with and without bounds checks, and compare every parameter with the interpreter's."""
    wanted = interpret(read(func), *arrays)
    for check_bounds in bounds:
        for number, (found, want) in enumerate(zip(run(func, *arrays, mcpu=mcpu, check_bounds=check_bounds), wanted)):
            close(found, want, epsilon, f"parameter {number}, {'with' if check_bounds else 'without'} bounds checks")


def close(found, want, epsilon=None, what="the result"):
    """Check equality: of whole numbers exactly, of floats up to the type's rounding."""
    if found.dtype.kind in "iub":
        np.testing.assert_array_equal(found, want.astype(found.dtype), err_msg=what)
        return
    got = found.astype("float64")
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=f"NaN in {what}")
    finite = np.isfinite(want) & np.isfinite(got)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=what)
    scale = np.abs(want[finite]).max(initial=0) or 1.0
    error = np.abs(got[finite] - want[finite]).max(initial=0) / scale
    limit = EPSILONS[found.dtype.name] if epsilon is None else epsilon
    assert error <= limit, f"{what}: relative error {error}, up to {limit} is rounding"


def normal(rng, shape, dtype="float32"):
    """Random numbers of a type: normal floats, small integers."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -9, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype("float32").astype(dtype)


def poison(shape, dtype="float32"):
    """An output that shows what wasn't written."""
    dtype = np.dtype(dtype)
    return np.full(shape, 77 if dtype.kind in "iu" else np.nan).astype(dtype)
