"""The stage that computed a wrong result: the first that left something wrong in what it writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.checking.comparing import difference, is_float
from tvm_axe.checking.reference import Alone, Expected, exposed
from tvm_axe.executable.mesh import MeshExecutable
from tvm_axe.lower.parsing import parse_program
from tvm_axe.tile.kernels.check import poison

__all__ = ["wrong_on_mesh", "wrong_on_one_device"]


def wrong_on_one_device(
    func: tirx.PrimFunc, origin: tirx.PrimFunc, given: Mapping[str, np.ndarray], expected: Expected, output: str
) -> str:
    """The blocks that write the first buffer that is wrong after a run on one device.

    The buffers that both functions allocate under one name and of one shape are compared; an element that was never
    written isn't. Where none of them is wrong it is what writes the output, or one of the buffers that a primitive has
    brought in.
    """
    wanted = _held(origin, given, wide=True)
    held = _held(func, given)
    common = {
        name: expected_array
        for name, expected_array in wanted.items()
        if name in held and held[name].shape == expected_array.shape
    }
    for name in _in_order(func):
        if name in expected.arrays:
            if name == output:
                break
            continue
        if name in common and _differs(held[name], common[name], expected.slack[output]):
            return f"{_written(func, name)}, which computes {name}"
    order = _in_order(func)
    known = [name for name in order[: order.index(output) if output in order else None] if name in common]
    checked = f"; {', '.join(known)} before it {'is' if len(known) == 1 else 'are'} right" if known else ""
    return f"{_written(func, output)}, which computes {output}{checked}"


def wrong_on_mesh(
    exe: MeshExecutable,
    func: tirx.PrimFunc,
    held: Mapping[str, np.ndarray],
    given: Mapping[str, np.ndarray],
    expected: Expected,
    output: str,
) -> str:
    """The stage that writes the first tensor of the mesh that is wrong after a run.

    What devices exchange is compared with what the same function computes on one device. What a device keeps for itself
    isn't seen, so the stage may be one that has read that.
    """
    program = parse_program(func, exe.mesh)
    wanted = _held(func, given, wide=True)
    for stage, lowered in zip(program.stages, exe.stages):
        for block in stage.blocks:
            for access in block.writes:
                name = program.names[access.buffer]
                want = wanted.get(str(access.buffer.name))
                if name not in held or want is None or want.shape != held[name].shape:
                    continue
                if _differs(held[name], want, expected.slack.get(name, expected.slack[output])):
                    over = f" over {lowered.axis}" if lowered.axis else ""
                    return f"{lowered.name} ({lowered.kind}{over}), which leaves {name}"
    return f"{_written(func, output)}, which computes {output}"


def _held(func: tirx.PrimFunc, given: Mapping[str, np.ndarray], wide: bool = False) -> dict[str, np.ndarray]:
    """Every buffer of a function after a run on one device, by name; in float64, where it can be computed in that."""
    shown = exposed(func)
    if wide:
        try:
            return Alone(_tvm.widened(shown))(given)
        except _tvm.UPSTREAM_ERRORS as error:
            _tvm.raise_own_fault(error)
    return Alone(shown)(given)


def _differs(got: np.ndarray, want: np.ndarray, slack: float) -> bool:
    """Whether a buffer is wrong where it was written at all: a primitive may leave out what nobody reads."""
    unwritten = got == poison((), str(got.dtype)) if not is_float(got.dtype) else np.isnan(got.astype("float64"))
    return bool(difference(np.where(unwritten, np.zeros((), got.dtype), got), np.where(unwritten, 0, want), slack))


def _in_order(func: tirx.PrimFunc) -> list[str]:
    """The names of the buffers that a function writes, in the order in which it begins to."""
    found: dict[str, None] = {}
    tvm_ffi.structural_walk(
        func.body, (s_tir.SBlock, lambda block: found.update((str(w.source.name), None) for w in block.writes))
    )
    return list(found)


def _written(func: tirx.PrimFunc, name: str) -> str:
    """The blocks that write a buffer, in words."""
    blocks: list[str] = []

    def on_block(block: s_tir.SBlock) -> None:
        if any(str(write.source.name) == name for write in block.writes):
            blocks.append(f"block {str(block.name_hint)!r}")

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    return " and ".join(blocks) or "none of its blocks"
