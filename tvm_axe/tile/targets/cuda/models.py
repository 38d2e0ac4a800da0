"""The two models of a CUDA kernel, and which of them a program runs in.

*Specialized*: a producer warp loads by TMA what consumer warpgroups multiply by wgmma (sm_90a). *Uniform*: every warp
loads and computes (sm_80, sm_89, sm_100a, what the tensor cores of sm_90a don't do, and what flags order between roles
no more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.checks import check_atomics
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Gemm
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.boxes import with_boxes
from tvm_axe.tile.targets.cuda.instructions import eight_bits, philox, small_integers
from tvm_axe.tile.targets.cuda.plan import CudaPlan
from tvm_axe.tile.targets.cuda.specialized.emit import lower as _lower_specialized
from tvm_axe.tile.targets.cuda.specialized.obstacles import obstacle
from tvm_axe.tile.targets.cuda.specialized.ordering import OrderError
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.specialized.plan import decide as _decide_specialized
from tvm_axe.tile.targets.cuda.strided import widths
from tvm_axe.tile.targets.cuda.uniform.emit import lower as _lower_uniform
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan
from tvm_axe.tile.targets.cuda.uniform.plan import decide as _decide_uniform
from tvm_axe.tile.targets.cuda.uniform.warpgroups import is_gathered


def decide(program: TileProgram, target: Target) -> CudaPlan:
    """Decide everything about a program.

    Raises
    ------
    TileError
        The program asks for what the target or its tiles can't do: roles, an instruction, threads, shared memory, a
        type; the uses of a fragment want different layouts; or roles are asked for between which flags don't order what
        they should.
    """
    check_atomics(program)
    plan = _decide(program, target)
    return replace(plan, decisions=(*plan.decisions, *widths(program)))


def _decide(program: TileProgram, target: Target) -> CudaPlan:
    """The same in one of the models: the specialized one if it can, in which TMA moves what boxes it can."""
    roles, why = program.options.get("roles"), None
    for boxed in _boxed(program):
        why = obstacle(boxed, target)
        if why is None and roles is None:
            why = _gathered(boxed)
        if why is not None or roles == "uniform":
            continue
        try:
            return _decide_specialized(boxed, target)
        except TileError as error:
            if boxed is program and (roles == "specialized" or not isinstance(error, OrderError)):
                raise
            why = error.reason if isinstance(error, OrderError) else str(error)
    if roles == "specialized":
        raise TileError(f"kernel: roles='specialized', but {why}; without it the roles are uniform")
    return _decide_uniform(program, target, why or "as annotated")


def _boxed(program: TileProgram) -> Iterator[TileProgram]:
    """The program with copies in the place of parallels that move boxes, of those that load them, and as it is."""
    if (boxed := with_boxes(program)) is not program:
        yield boxed
        yield with_boxes(program, stores=False)
    yield program


def _gathered(program: TileProgram) -> str | None:
    """Why all warps had better load, as a sentence; None if copies are what fills operands."""
    gemm = next((node for node in program.nodes() if isinstance(node, Gemm) and is_gathered(program, node)), None)
    if gemm is None:
        return None
    return f"what {gemm} multiplies is gathered, which a producer warp only does where it is a box"


def lower(plan: CudaPlan) -> tirx.PrimFunc:
    """The function that upstream's ``tirx`` pipeline compiles."""
    func = small_integers.decoded(eight_bits.in_pairs(_MODELS.of(plan)(plan)))
    return philox.defined(_through_float32(func))


_MODELS: TypeTable[Callable[[Any], tirx.PrimFunc]] = TypeTable(
    "models of a CUDA kernel", {SpecializedPlan: _lower_specialized, UniformPlan: _lower_uniform}
)


def _through_float32(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Casts between bfloat16 and float16 made by way of float32, which has all values of both.

    Where an integer is made of such a cast, ptxas of CUDA 13.0 makes it of the other type's bits.
    """

    def by_float32(cast: tirx.Cast) -> tirx.Expr:
        source, target = (str(expr.ty).partition("x") for expr in (cast.value, cast))
        if {source[0], target[0]} != {"bfloat16", "float16"}:
            return cast
        return cast.value.astype("".join(("float32", *source[1:]))).astype(str(cast.ty))

    return func.with_body(_tvm.structural_map(func.body, (tirx.Cast, by_float32)))
