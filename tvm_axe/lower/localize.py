"""Localize: one stage becomes the function that a device runs.

Bound loops become the device's own coordinate, buffers shrink to the device's slab, and an access that crosses devices
goes through the *mesh view* of its buffer: the slabs of all devices along a mesh axis, dimension 0 the device. A store
that every device needs is repeated for each peer. Of a stage that is cut into chunks, the kernel does one chunk: on
windows of its arguments where that is all the difference there is between chunks, else it takes the chunk's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import element
from tvm_axe.analysis.expressions import loads_in, substitute, uses
from tvm_axe.collective import SLAB
from tvm_axe.errors import LowerError
from tvm_axe.lower.derive import EXCHANGE, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.pieces import linear, own_pieces, shared_pieces, within
from tvm_axe.lower.program import Block, LocalIterator, ScheduledProgram
from tvm_axe.lower.reaching import push_axis
from tvm_axe.lower.views import view_buffer
from tvm_axe.lower.window import Window, calling
from tvm_axe.schedule import BIND, TILE, set_layout

OWN = SLAB
STEP, CHUNK = "step", "chunk"


@dataclass(frozen=True)
class Kernel:
    """A device's function for one stage: its buffers, as own slabs or views along a mesh axis, then coordinates.

    The last parameters of one that does a chunk are those of `chunk`: the step around the ring, the chunk of a slice.
    Where there is a `caller`, `func` sees `windows` of the buffers (None: the whole) and takes nothing beside them; the
    caller takes the whole buffers and all the rest.
    """

    func: tirx.PrimFunc
    arguments: tuple[tuple[tirx.Buffer, str], ...]
    coordinates: tuple[str, ...]
    chunk: tuple[str, ...] = ()
    caller: Callable[[str], tirx.PrimFunc] | None = None
    """Given the kernel's name in the module, the function of whole buffers that calls it on windows of them."""
    windows: tuple[Window | None, ...] = ()
    touched: tuple[tuple[int, bool], ...] = ()
    """Of one that isn't of blocks, the numbers of the buffers that it touches, and whether it writes them."""


def localize(
    program: ScheduledProgram, step: Step, shardings: Mapping[tirx.Buffer, Sharding], private: tuple[tirx.Buffer, ...]
) -> Kernel:
    """The kernel of one local stage, mesh kernel or exchange; `private` buffers live inside it."""
    if step.kind == EXCHANGE:
        return _exchange(program, step, shardings)
    localizer = _Localizer(program, step, shardings, private)
    kernel = localizer.kernel({})
    windows = localizer.found_windows()
    if any(windows.values()):
        # Of what lives inside the kernel a window is enough in any case.
        inside = {key: window for key, window in windows.items() if window is not None and key[0] in private}
        if inside:
            kernel = localizer.kernel(inside)
        outside = {key: window for key, window in windows.items() if key[0] not in private}
        row_major = all(shardings[buffer].memory is None for buffer, _ in outside)  # a window is of rows
        if row_major and all(
            w is not None and w.can_be_passed(shardings[b].slab, b.dtype) for (b, _), w in outside.items()
        ):
            windowed = localizer.kernel(inside | outside)
            if not windowed.coordinates and not windowed.chunk:
                kernel = localizer.called_on_windows(kernel, windowed, outside)
    laid_out = [(program.names[buffer], shardings[buffer].memory) for buffer, _ in kernel.arguments]
    if all(memory is None for _, memory in laid_out):
        return kernel
    sch = s_tir.Schedule(kernel.func)
    for name, memory in laid_out:
        if memory is not None:
            set_layout(sch, name, memory)
    for param, (buffer, _) in zip(sch.mod["main"].params, kernel.arguments):
        memory, shape = shardings[buffer].memory, tuple(map(int, param.shape))
        if memory is not None and shape != shardings[buffer].stored:
            raise LowerError(
                f"stage {step.stage.name!r}: {buffer.name!r} lies as {memory}, in {prod(shardings[buffer].stored)} "
                f"elements, and upstream's transform_layout takes {prod(shape)} for it; declare its last rows padded, "
                "or without the dimensions of extent 1"
            )
    return replace(kernel, func=sch.mod["main"].without_attr("global_symbol"))


def _exchange(program: ScheduledProgram, step: Step, shardings: Mapping[tirx.Buffer, Sharding]) -> Kernel:
    source, target = step.source, step.target
    assert source is not None and target is not None and step.exchange is not None
    slabs = (shardings[source].stored, shardings[target].stored)
    names = (program.names[source], program.names[target])
    func = step.exchange.kernel(str(source.dtype), slabs, names, program.page)
    asked = tuple(str(param.name) for param in func.params[2:])
    return Kernel(func, ((source, step.axis or OWN), (target, OWN)), asked)


class _Localizer:
    """Writes the kernel of one stage, for any choice of windows; made once a stage.

    What holds all along:

    - The stage's nest is walked from the outside in, and each of its blocks is written once a kernel.
    - A device loop leaves no loop behind: in its place stands the device's coordinate, a variable of the program. A
      loop of `cut`, over the chunks or around the ring, leaves none either: in its place stands `chunk_var`, or
      `slice_var`, which `around_ring` replaces by the coordinate and `step_var` before the function is made. A kernel
      takes those of these variables that its body still uses, and no others.
    - ``whole = replacement(coordinates, local)`` for every iterator of a block, and ``local = places(cut, inner)``,
      where `inner` runs over what a chunk leaves of it. The block's analyzer knows the bounds of all of these before
      any index is simplified. Where an element lies is decided in `local`, as `derive` does: that a last chunk is
      shorter isn't seen in `inner`.
    - An element of a whole buffer has one address on a device: `address` says in which view and at which index, and
      `local` has one buffer for each (buffer, view). A buffer that the stage exchanges is seen through the mesh view
      in all of its accesses (`viewed`): two arguments for one memory would overlap, and kernels say that theirs don't.
    - A window holds for every access to its (buffer, view): `seen` collects what each access would need, and only
      where all need the same is there one. What an index is less the window's start stays below its number of rows.
    """

    def __init__(
        self,
        program: ScheduledProgram,
        step: Step,
        shardings: Mapping[tirx.Buffer, Sharding],
        private: tuple[tirx.Buffer, ...],
    ) -> None:
        self.program, self.step, self.shardings, self.private = program, step, shardings, private
        self.windows: Mapping[tuple[tirx.Buffer, str], Window | None] = {}  # of the kernel that is being written
        self.seen: dict[tuple[tirx.Buffer, str], set[Window | None]] = {}  # what each access takes for its chunk
        self.local: dict[tuple[tirx.Buffer, str], tirx.Buffer] = {}
        self.peer_vars: dict[Block, tirx.Var] = {}
        self.places: dict[tirx.Var, tirx.Expr] = {}  # of the block that is written: its iterators in those of a chunk
        self.by_realize = {block.realize: block for block in step.stage.blocks}
        self.step_var, self.chunk_var = tirx.Var(STEP, "int32"), tirx.Var(CHUNK, "int32")
        self.slice_var = tirx.Var("slice", "int32")
        self.viewed = {
            buffer: step.axis
            for buffer in step.pulled | step.pushed
            if step.axis is not None and not any(buffer.same_as(other) for other in private)
        }
        self.cut: dict[tirx.Var, tirx.Var] = {}  # the loops over chunks and around the ring -> what stands for them
        overlap = step.stage.overlap
        if overlap is not None and overlap.ring is not None:
            self.cut[overlap.ring.loop_var] = self.slice_var  # first, as a slice is the larger piece
        if overlap is not None:
            self.cut[overlap.chunk.loop_var] = self.chunk_var

    def kernel(self, windows: Mapping[tuple[tirx.Buffer, str], Window | None]) -> Kernel:
        """The kernel in which `windows` stand for these buffers."""
        self.windows, self.seen, self.local, self.peer_vars = windows, {}, {}, {}
        body = self.statement(self.step.stage.nest)
        written = [access.buffer for block in self.step.stage.blocks for access in block.writes]
        arguments = [key for key in self.local if not any(key[0].same_as(buffer) for buffer in self.private)]
        allocated = [self.local[key] for key in self.local if key not in arguments]
        arguments.sort(key=lambda key: any(key[0].same_as(buffer) for buffer in written))  # inputs before outputs
        body = self.around_ring(body)
        root = s_tir.SBlock([], [], [], "root", body, alloc_buffers=allocated)
        coordinates = tuple(axis for axis, var in self.program.coordinates.items() if uses(body, var))
        chunk = [var for var in (self.step_var, self.chunk_var) if uses(body, var)]
        params = [self.local[key] for key in arguments] + [self.program.coordinates[axis] for axis in coordinates]
        params += chunk
        func = tirx.PrimFunc(params, s_tir.SBlockRealize([], True, root))
        # Of one function without this mark upstream concludes that buffers may overlap in all the module's functions.
        attrs = {"s_tir": True, "tirx.noalias": True}
        names = tuple(str(var.name) for var in chunk)
        return Kernel(s_tir.renew_defs(func.with_attrs(attrs)), tuple(arguments), coordinates, names)

    def around_ring(self, body: tirx.Stmt) -> tirx.Stmt:
        """Say which device's slice it is that the ring's step takes this device to."""
        at = self.slice_at()
        return body if at is None else substitute(body, {self.slice_var: at})

    def slice_at(self) -> tirx.Expr | None:
        """The device whose slice the ring's step takes this device to."""
        overlap = self.step.stage.overlap
        if overlap is None or overlap.axis is None:
            return None
        return (self.program.coordinates[overlap.axis] + self.step_var) % self.program.mesh.axis_size(overlap.axis)

    def found_windows(self) -> dict[tuple[tirx.Buffer, str], Window | None]:
        """For each buffer the window that every access to it stays in, or None if there is none."""
        return {key: next(iter(seen)) if len(seen) == 1 else None for key, seen in self.seen.items()}

    def called_on_windows(
        self, kernel: Kernel, windowed: Kernel, windows: Mapping[tuple[tirx.Buffer, str], Window | None]
    ) -> Kernel:
        """`windowed`, with a caller that takes what `kernel` takes, the one of whole buffers that it stands for."""
        whole = [self.declared(*key) for key in kernel.arguments]
        found = [windows.get(key) for key in kernel.arguments]
        rows = tuple(None if window is None or not window.rows else window for window in found)
        scalars = [self.program.coordinates[axis] for axis in kernel.coordinates]
        scalars += [{STEP: self.step_var, CHUNK: self.chunk_var}[name] for name in kernel.chunk]
        zero = tirx.IntImm("int32", 0)
        turn = self.slice_at()
        at = {"slice": zero if turn is None else turn, "chunk": self.chunk_var if CHUNK in kernel.chunk else zero}

        def caller(name: str) -> tirx.PrimFunc:
            return s_tir.renew_defs(calling(name, whole, rows, scalars, at))

        return replace(kernel, func=windowed.func, caller=caller, windows=rows)

    def chunked(self, block: Block, iterator: LocalIterator) -> tuple[LocalIterator, tirx.Expr]:
        """What one chunk leaves of an iterator, and what the iterator was in terms of that."""
        assert iterator.local is not None
        local, value, place = iterator.local, iterator.value, iterator.local.var
        for loop_var, var in self.cut.items():
            coefficient, base = linear(value, loop_var)
            if coefficient is None:
                raise LowerError(
                    f"block {block.name!r}: iterator {iterator.whole.var.name!r} = {iterator.value} doesn't go through "
                    f"the chunks of {loop_var.name!r} in contiguous pieces; overlap before loops are fused"
                )
            if not coefficient:
                continue
            if local.iter_type == tirx.IterVar.CommReduce:
                raise LowerError(
                    f"block {block.name!r} reduces over the chunks of {loop_var.name!r}, each of which would start "
                    "anew; leave it out of the stages that overlap"
                )
            if coefficient >= int(local.dom.extent):  # a single chunk, of which devices of another axis have parts
                value = base
                continue
            inner = tirx.IterVar(ir.Range(0, coefficient), tirx.Var(local.var.name, local.var.ty), local.iter_type)
            place = substitute(place, {local.var: var * coefficient + inner.var})
            local, value = inner, base
            block.analyzer.bind(inner.var, inner.dom)
        return replace(iterator, local=local, value=value), place

    def buffer(self, buffer: tirx.Buffer, view: str) -> tirx.Buffer:
        """What stands for `buffer` in the kernel: the device's slab (or a window of it), or the mesh view."""
        key = (buffer, view)
        if key not in self.local:
            window = self.windows.get(key)
            rows = None if window is None or not window.rows else window.rows
            self.local[key] = self.declared(buffer, view, rows)
        return self.local[key]

    def declared(self, buffer: tirx.Buffer, view: str, rows: int | None = None) -> tirx.Buffer:
        """A new one of these, of so many rows of the slab if not of all."""
        name = self.program.names[buffer] + ("" if view == OWN else f"_{view}")
        return view_buffer(
            self.program.mesh, view, self.shardings[buffer].slab, buffer.dtype, name, self.program.page, rows
        )

    def statement(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.For):
            return self.loop(stmt)
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self.statement(part) for part in stmt.seq])
        return self.block(self.by_realize[stmt])

    def loop(self, loop: tirx.For) -> tirx.Stmt:
        below = [block for block in self.step.stage.blocks if any(loop.same_as(other) for other in block.loops)]
        devices = [any(loop.same_as(own) for own in block.device.values()) for block in below]
        if any(devices):
            if not all(devices):
                raise LowerError(
                    f"loop {loop.loop_var.name!r} is bound to a mesh axis and is a device loop for some of its blocks "
                    f"and a peer loop for others ({', '.join(block.name for block in below)}); move them apart"
                )
            return self.statement(loop.body)
        if loop.loop_var in self.cut:
            return self.statement(loop.body)
        if loop.kind == tirx.ForKind.VECTORIZED and len(below) > 1:
            names = ", ".join(block.name for block in below)
            raise LowerError(
                f"loop {loop.loop_var.name!r} is vectorized around the blocks {names}; "
                "where one is masked, upstream then runs the first for all lanes before the second, with the room of "
                "one lane between them: vectorize a loop of one block"
            )
        if loop.kind == tirx.ForKind.PARALLEL and self.is_in_parallel(loop, below[0]):
            raise LowerError(
                f"block {below[0].name!r}: loop {loop.loop_var.name!r} is parallel inside another parallel loop, which "
                "upstream's thread pool doesn't run; fuse the two, or leave one serial"
            )
        annotations = {key: value for key, value in loop.annotations.items() if key != BIND}
        wrap = self.peer_loop(below[0]) if len(below) == 1 else None
        body = self.statement(loop.body)
        own = tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, annotations)
        return wrap(own) if wrap else own

    def is_in_parallel(self, loop: tirx.For, block: Block) -> bool:
        """Whether a loop of the kernel around `loop`, one of the block's, is parallel."""
        outer = block.loops[: next(at for at, own in enumerate(block.loops) if own.same_as(loop))]
        gone = [*block.device.values(), *(own for own in outer if own.loop_var in self.cut)]
        kept = [own for own in outer if not any(own.same_as(other) for other in gone)]
        return any(own.kind == tirx.ForKind.PARALLEL for own in kept)

    def peer_loop(self, block: Block) -> Callable[[tirx.Stmt], tirx.Stmt] | None:
        """What repeats `block`'s own loops for each peer, if its store is pushed and nothing repeats it yet."""
        axis = push_axis(block.writes[0], self.shardings[block.writes[0].buffer])
        if axis is None or block in self.peer_vars:
            return None
        var = self.peer_vars[block] = tirx.Var(f"{axis}_peer", "int32")
        size = self.program.mesh.axis_size(axis)
        return lambda body: tirx.For(var, 0, size, tirx.ForKind.SERIAL, body)

    def block(self, block: Block) -> tirx.Stmt:
        wrap = self.peer_loop(block)
        if self.step.stage.overlap is not None:
            for loop_var, var in self.cut.items():
                loop = next(loop for loop in block.loops if loop.loop_var.same_as(loop_var))
                block.analyzer.bind(var, ir.Range(0, loop.extent))
        self.places = {}
        iterators = list[LocalIterator]()
        for iterator in block.iterators:
            if iterator.local is not None:
                left, self.places[iterator.local.var] = self.chunked(block, iterator)
                iterators.append(left)
        iter_vars, values = [it.local for it in iterators], [it.value for it in iterators]
        peer = None
        if block in self.peer_vars:
            axis = push_axis(block.writes[0], self.shardings[block.writes[0].buffer])
            peer = tirx.Var(f"v{axis}_peer", "int32")
            domain = ir.Range(0, self.program.mesh.axis_size(str(axis)))
            iter_vars.append(tirx.IterVar(domain, peer, tirx.IterVar.DataPar))
            values.append(self.peer_vars[block])
        statement = block.realize.block
        replacements = {it.whole.var: it.replacement for it in block.iterators}
        body = self.store(block, statement.body, replacements, peer)
        init = None if statement.init is None else self.store(block, statement.init, replacements, peer)
        reads = [element(load.source, load.indices) for load in loads_in([body.value, list(body.indices)])]
        if init is not None:  # a reduction's own running value is no read
            reads = [region for region in reads if not region.source.same_as(body.buffer)]
        # What the schedule says of the mesh is done with; kernels alike are then alike for tuning.
        annotations = {
            key: value
            for key, value in statement.annotations.items()
            if not str(key).startswith("axe.") or str(key).startswith(TILE)
        }
        local = s_tir.SBlock(
            iter_vars, reads, [element(body.buffer, body.indices)], statement.name_hint, body, init,
            annotations=annotations,
        )  # fmt: skip
        scalars = {loop.loop_var: self.program.coordinates[axis] for axis, loop in block.device.items()} | self.cut
        predicate = block.analyzer.simplify(substitute(block.realize.predicate, scalars))
        realize = s_tir.SBlockRealize(values, predicate, local)
        return wrap(realize) if wrap else realize

    def store(
        self,
        block: Block,
        store: tirx.BufferStore,
        replacements: Mapping[tirx.Var, tirx.Expr],
        peer: tirx.Var | None,
    ) -> tirx.BufferStore:

        def on_load(load: ir.TensorLoad) -> ir.TensorLoad:
            buffer, indices = self.address(block, load.source, load.indices, None)
            return tirx.BufferLoad(buffer, indices)

        value, *whole = (
            _tvm.structural_map(part, [(tirx.Var, lambda var: replacements.get(var, var)), (ir.TensorLoad, on_load)])
            for part in (store.value, *store.indices)
        )
        buffer, indices = self.address(block, store.buffer, whole, peer)
        return tirx.BufferStore(buffer, substitute(value, self.places), indices)

    def address(
        self, block: Block, whole: tirx.Buffer, indices: Sequence[tirx.Expr], peer: tirx.Var | None
    ) -> tuple[tirx.Buffer, list[tirx.Expr]]:
        """Where element `indices` of the whole buffer lies for this device: in its own slab, or in the mesh view."""
        sharding, simplify = self.shardings[whole], block.analyzer.simplify
        view, device, local = OWN, peer, []
        for dim, index in enumerate(simplify(index) for index in indices):
            inner, cut, coordinates = index, sharding.cuts[dim], self.program.coordinates
            if cut:
                own = sharding.pieces(dim)
                held = shared_pieces(
                    own_pieces(index, coordinates, block.device, self.program.mesh, block.analyzer), own
                )
                for axis, _ in own[:held]:
                    inner = linear(inner, coordinates[axis])[1]
                if held < len(cut):  # of what isn't held, the devices of one axis can be reached: see derive
                    (view, piece), *_ = own[held:]
                    device, inner = simplify(inner // piece), simplify(inner % piece)
            if dim not in sharding.partial:
                local.append(inner)
        if peer is not None:
            view = str(push_axis(block.writes[0], sharding))
        if device is not None:
            local = [device, *local]
        if view == OWN and whole in self.viewed:
            # The kernel goes through the mesh view anyway: two arguments for one memory would overlap.
            view = self.viewed[whole]
            local = [self.program.coordinates[view], *local]
        if self.cut:
            local = [simplify(substitute(index, self.places)) for index in local]
            self.seen.setdefault((whole, view), set()).add(self.window(block, view, local))
            window = self.windows.get((whole, view))
            if window is not None and window.rows:
                start = window.start({"slice": self.slice_var, "chunk": self.chunk_var})
                local = [simplify(local[0] - start), *local[1:]]
        return self.buffer(whole, view), local

    def window(self, block: Block, view: str, indices: Sequence[tirx.Expr]) -> Window | None:
        """The rows of a slab that a chunk touches by `indices`; None if these are no rows of its leading dimension.

        Of a mesh view, whose leading dimension is the device, there are no rows but all.
        """
        others = indices[1:] if view == OWN else indices
        if any(uses(index, var) for index in others for var in (self.slice_var, self.chunk_var)):
            return None
        coefficients, rest = [], indices[0] if indices else tirx.IntImm("int32", 0)
        for var in (self.slice_var, self.chunk_var):
            coefficient, rest = linear(rest, var)
            if coefficient is None:
                return None
            coefficients.append(coefficient)
        window = Window(*coefficients)
        return window if not window.rows or within(rest, window.rows, block.analyzer) else None
