"""lower: from a scheduled function to the module that each device runs, and what is known of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.target import Target

from tvm_axe.analysis.directions import Direction, directions
from tvm_axe.collective import ALL
from tvm_axe.collective.arena import PAGE
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.beside import arranged
from tvm_axe.lower.calls import Call
from tvm_axe.lower.derive import derive_steps
from tvm_axe.lower.emit import Emitter
from tvm_axe.lower.infer import Sharding, infer_shardings
from tvm_axe.lower.localize import OWN
from tvm_axe.lower.notation import notation
from tvm_axe.lower.parsing import parse_program
from tvm_axe.lower.program import ScheduledProgram
from tvm_axe.schedule import layouts_of


@dataclass(frozen=True)
class Stage:
    """One stage of a lowered function.

    `kind` is one that `derive` lists; `axis` is ``"*"`` where it is over several; `received` is what each device
    receives of its peers, in bytes, and `memory` the bytes of its own that it touches; `kernel` is the name of its
    function in the module, None for a plain collective; `chunks` is how many pieces of a device's slice it takes in
    turn, 1 where it overlaps no other; `inserted` is what it was inserted for (`tvm_axe.lower.inserting`);
    `operations` are the multiplications and additions of its matmuls, of a device on average.
    """

    name: str
    kind: str
    axis: str | None
    received: tuple[int, ...]
    kernel: str | None
    memory: int
    chunks: int
    inserted: str | None = None
    operations: float = 0.0

    @property
    def bytes(self) -> int:
        """What the busiest device receives of its peers."""
        return max(self.received)


@dataclass(frozen=True)
class MeshBuffer:
    """A tensor that the caller allocates on the mesh: a parameter, or an intermediate that devices exchange.

    Flags are zero before a run and behind it, and nobody else's business.
    """

    name: str
    dtype: str
    sharding: Sharding
    is_input: bool
    is_output: bool
    is_flags: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole shape."""
        return self.sharding.shape

    @property
    def layout(self) -> Layout:
        return self.sharding.layout


@dataclass(frozen=True)
class Lowered:
    """What each device of `mesh` runs; `notation` is its schedule as CoCoNet writes it.

    ``module["main"]`` takes one tensor for each (buffer name, view) of `arguments`, where the view is ``"slab"`` or a
    mesh axis, then the device's coordinate on each axis of `coordinates`. It makes the `calls`, in order, the same on
    each device; what it allocates is left out of them. Slabs lie whole
    pages of `page` bytes apart. `forms` are lines on how stages overlap: which collectives run beside others
    (`tvm_axe.lower.beside`), and which regions do how, where the target has other forms of that than chunks
    (`tvm_axe.lower.pairs`).
    """

    name: str
    mesh: Mesh
    module: tvm.IRModule
    calls: tuple[Call, ...]
    notation: str
    stages: tuple[Stage, ...]
    buffers: Mapping[str, MeshBuffer]
    layouts: Mapping[str, Layout]
    arguments: tuple[tuple[str, str], ...]
    coordinates: tuple[str, ...]
    page: int = PAGE
    forms: tuple[str, ...] = ()

    @property
    def inserted(self) -> tuple[str, ...]:
        """What a redistribution was inserted for, a line each with the bytes that a device receives for it."""
        moved: dict[str, int] = {}
        for stage in self.stages:
            if stage.inserted is not None:
                moved[stage.inserted] = moved.get(stage.inserted, 0) + stage.bytes
        return tuple(f"{why}: {bytes_:,} bytes" for why, bytes_ in moved.items())

    def devices(self, stage: Stage) -> int:
        """How many devices a stage's communication is among: those along its axis, all of them, or one."""
        return self.mesh.size if stage.axis == ALL else 1 if stage.axis is None else self.mesh.axis_size(stage.axis)

    @property
    def inputs(self) -> list[MeshBuffer]:
        return [buffer for buffer in self.buffers.values() if buffer.is_input]

    @property
    def outputs(self) -> list[MeshBuffer]:
        return [buffer for buffer in self.buffers.values() if buffer.is_output]


def lower(
    func: tirx.PrimFunc, mesh: Mesh, page: int = PAGE, target: Target | None = None, apart: Collection[str] = ()
) -> Lowered:
    """Infer layouts, derive collectives, localize and emit.

    Parameters
    ----------
    func : PrimFunc
        A function over whole tensors, scheduled for `mesh` (loops annotated ``axe.bind``) or not at all;
        ``axe.layouts`` may say how its parameters lie.
    mesh : Mesh
        The devices.
    page : int
        Bytes of a page of the devices' memory (`tvm_axe.machines.Backend.page`), of which slabs lie whole ones apart.
    target : Target, optional
        What the devices are, resolved, if products and collectives that overlap may become its kernels
        (`tvm_axe.lower.pairs`); without it they are chunks in turns.
    apart : collection of str
        The mesh axes whose devices don't see each other's memory.

    Raises
    ------
    LowerError
        If a stage touches what its device doesn't own outside a collective, or in a kernel over an axis that is apart;
        the function isn't made of plain nests; or a mesh axis is called as a device's own slab is.
    LayoutError
        If a declared layout doesn't fit its parameter or the mesh.
    """
    if OWN in mesh.names:
        raise LowerError(f"mesh {mesh}: {OWN!r} is what a device's own share of a buffer is called; rename that axis")
    program = parse_program(func, mesh, page)
    declared = layouts_of(func)
    shardings = infer_shardings(program, declared)
    emitter = _emitter(program, shardings, target, apart)
    sequential = emitter.sequential
    if sequential:
        program = program.in_sequence(sequential)
        emitter = _emitter(program, shardings, target, apart)
    emitted = emitter.module()
    stages = tuple(
        Stage(
            step.name,
            str(step.kind),
            step.axis,
            step.received,
            kernel,
            memory,
            1 if step.stage.overlap is None else step.stage.overlap.chunks,
            step.stage.inserted,
            sum(block.operations(mesh)[0] for block in step.stage.blocks),
        )
        for step, kernel, memory in zip(emitted.steps, emitted.kernels, emitted.memory)
    )
    parameters = dict(zip(program.parameters, directions(func)))
    buffers = {
        emitted.names[b]: _mesh_buffer(emitted.names[b], b, emitted.shardings[b], parameters, b in emitted.flags)
        for b in emitted.mesh_buffers
    }
    layouts = {program.names[b]: shardings[b].layout for b in program.buffers()}
    layouts |= {program.names[b]: declared[b.name] for b in program.parameters if b.name in declared}
    return Lowered(
        program.name,
        mesh,
        emitted.module,
        emitted.calls,
        notation(emitter.steps, shardings),
        stages,
        buffers,
        layouts,
        emitted.arguments,
        emitted.coordinates,
        page,
        (*sequential.values(), *emitted.forms),
    )


def _emitter(
    program: ScheduledProgram, shardings: Mapping[tirx.Buffer, Sharding], target: Target | None, apart: Collection[str]
) -> Emitter:
    """What emits a program, whose steps are derived and in their order."""
    return Emitter(program, arranged(derive_steps(program, shardings, apart), shardings), shardings, target)


def _mesh_buffer(
    name: str,
    buffer: tirx.Buffer,
    sharding: Sharding,
    parameters: Mapping[tirx.Buffer, Direction],
    is_flags: bool,
) -> MeshBuffer:
    direction = parameters.get(buffer, Direction(False, False))
    return MeshBuffer(name, buffer.dtype, sharding, direction.is_input, direction.is_output, is_flags)
