"""The values of a session on a mesh, and calls that are bound to its weights.

A function takes a value as it is if it lies in the form that was chosen for the parameter; else it is brought to that,
on the devices. Tensors of values that have gone are used again.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tvm_axe import _tvm
from tvm_axe.collective import SLAB, Argument, BoundCall, Coord, Inside, MeshTensor, Timeline
from tvm_axe.collective.stored import stored
from tvm_axe.collective.workers import Item
from tvm_axe.errors import InputError, WorkerError
from tvm_axe.executable.objects import Kept, Places
from tvm_axe.executable.on_mesh import discard
from tvm_axe.executable.signatures import NUMBER, OBJECT, SHAPE, Signature
from tvm_axe.executable.sizes import room_of, sizes_of
from tvm_axe.executable.spread import ModelProgram, Pool, Spread
from tvm_axe.executable.weights import Weight
from tvm_axe.relax.device import DeviceFunction, Pack, Placed
from tvm_axe.relax.forms import local_shape
from tvm_axe.relax.sizes import names_in, shape_at
from tvm_axe.tracing import model_timeline

__all__ = ["MeshMemory"]

_AT_ONCE = 64  # tensors whose parts workers read for one command


class _Bound(NamedTuple):
    """A function with its weights.

    Attributes
    ----------
    of : DeviceFunction
        The function.
    inputs : mapping
        What a call brings: parameters by name, in order, and the tensors that each is put into, each with whether one
        slab is enough for all devices.
    counts : mapping
        Which of these are no tensors, by name: a ``"shape"``, a ``"number"`` or an ``"object"``.
    made : tuple of Placed
        The tensors that a call leaves or computes by, for which it needs memory.
    open : tuple of (str, str)
        The tensors, by name, that a call brings or leaves, each with a view of it.
    arguments : tuple
        All arguments, None for these, behind the numbers that the function takes first: sizes, and where objects are.
    call : BoundCall
        The others are bound in it.
    nesting : Any
        How results are put together (`tvm_axe.executable.signatures.Signature`).
    """

    of: DeviceFunction
    inputs: Mapping[str, tuple[tuple[Placed, bool], ...]]
    counts: Mapping[str, str]
    made: tuple[Placed, ...]
    open: tuple[tuple[str, str], ...]
    arguments: tuple[Argument | None, ...]
    call: BoundCall
    nesting: Any


class MeshMemory:
    """The `tvm_axe.executable.session.Memory` of a model on a mesh.

    Parameters
    ----------
    program : ModelProgram
        The model on its workers.
    functions : sequence of Signature
        Those of the model as it was given.
    """

    def __init__(self, program: ModelProgram, functions: Sequence[Signature]) -> None:
        workers = program.on()
        self.copied, self.held, self.lock = 0, (0,) * workers.mesh.size, workers.lock
        self._program, self._signatures = program, tuple(functions)
        self._pool, self._places = Pool(workers), Places(workers)
        self._fixed: dict[str, Spread] = {}  # weights and constants, by the names of the tensors
        self._functions: dict[str, _Bound] = {}
        self._slabs: dict[str, tuple[int, ...]] = {}  # of the tensors of values, by name
        self._calls: list[Item] = []
        weakref.finalize(self, discard, program.workers, self._calls)

    # ---- Weights

    def place(self, weights: Mapping[str, Weight]) -> None:
        with self.lock:
            try:
                self._place(weights)
            except BaseException:
                self.close()
                raise

    def _place(self, weights: Mapping[str, Weight]) -> None:
        shared, workers = self._program.shared, self._program.on()
        placed = {
            tensor.name: (tensor, weights[each.name])
            for function in shared.functions.values()
            for each in function.inputs
            if each.name in weights
            for tensor in each.tensors
        }
        self._reserve([tensor for tensor, _ in placed.values()])
        requests = []
        for name, (each, array) in placed.items():
            assert isinstance(array, np.ndarray)  # on a mesh there are no tuples
            tensor, source = self._fixed[name].tensor, stored(array)
            if source is None:
                self.copied += self._program.scatter(tensor, each.forms, array)
            else:
                requests.append((tensor, source, list(self._program.pieces(each.forms, array.shape))))
                self.copied += tensor.nbytes * (1 if tensor.shared else workers.mesh.size)
        for at in range(0, len(requests), _AT_ONCE):
            workers.read(requests[at : at + _AT_ONCE])
        self.held = (sum(self._fixed[name].tensor.nbytes for name in placed),) * workers.mesh.size
        self._pack_and_place_constants()
        between = self._between()
        spaces = self._program.workspaces
        nbytes = max((each.nbytes for each in spaces.values()), default=0)
        self._workspace = self._pool.take((nbytes,), "uint8") if nbytes else None
        for signature in self._signatures:
            function = shared.functions[signature.name]
            self._functions[signature.name] = self._bound(signature, function, frozenset(weights), between)

    def _pack_and_place_constants(self) -> None:
        """Have devices pack weights, and constants as these are placed, so that little is there twice."""
        shared = self._program.shared
        waiting = self._packed(list(shared.packs))
        for each, constant in shared.constants:
            self._reserve([each])
            self._program.scatter(self._fixed[each.name].tensor, each.forms, _tvm.as_array(constant))
            waiting = self._packed(waiting)
        missing = dict.fromkeys(name for pack in waiting for name in pack.sources if name not in self._fixed)
        if missing:
            raise InputError(
                f"load: {', '.join(missing)} are packed for the kernels once, and a call doesn't take them; give all "
                "weights to exe.load, or compile without pack_weights"
            )
        self._pool.trim()

    def _packed(self, waiting: Sequence[Pack]) -> list[Pack]:
        """Pack what is in place, and let go of what nobody reads as it was; returns what there isn't all of yet."""
        left = list(waiting)
        needed = {name for function in self._program.shared.functions.values() for name, _ in function.arguments}
        # What one has packed another may pack further.
        while ready := [pack for pack in left if self._fixed.keys() >= {*pack.sources}]:
            pack = ready[0]
            left.remove(pack)
            self._pack(pack)
            for name in {*pack.sources} - needed.union(*(other.sources for other in left)):
                del self._fixed[name]  # what it lay in is used for the next one of its shape
        return left

    def _pack(self, pack: Pack) -> None:
        """Have devices pack tensors that are in place."""
        for placed in pack.made:
            self._fixed[placed.name] = self._new(placed, shape_at(placed.shape, {}))
        made = [placed.name for placed in pack.made]
        sources, results = ([(self._fixed[name].tensor, SLAB) for name in names] for names in (pack.sources, made))
        given: list[Argument] = [*sources, *map(Coord, pack.coordinates), *results]
        self._program.on().call(self._program.loaded, given, pack.packer)

    def _reserve(self, placed: Sequence[Placed]) -> None:
        """Make the tensors of weights or constants; what all hold whole is stored once where all see it."""
        functions = self._program.shared.functions.values()
        seen = {name for function in functions for name, view in function.arguments if view != SLAB}
        seen.update(name for function in functions for name in function.overwritten)
        for each in placed:
            try:
                shape = shape_at(each.shape, {})  # no call decides what weights and constants are
                self._fixed[each.name] = self._new(each, shape, shared=each.is_whole and each.name not in seen)
            except WorkerError as error:
                if not self._program.on().closed:
                    whole = sum(_bytes(each) for each in placed)
                    raise WorkerError(
                        f"load: {each.name} doesn't fit, of weights of {whole} bytes on each device: {error}"
                    ) from error
                raise

    def _between(self) -> dict[str, MeshTensor]:
        """Tensors by which devices exchange what is computed: those of one function are another's too.

        Those of shapes that calls decide aren't among them.
        """
        made: dict[tuple[tuple[int, ...], str], list[MeshTensor]] = defaultdict(list)
        found: dict[str, MeshTensor] = {}
        for function in self._program.shared.functions.values():
            brought = {tensor.name for each in function.inputs for tensor in each.tensors}
            brought.update(self._fixed, (each.name for each in function.results))
            used: dict[tuple[tuple[int, ...], str], int] = defaultdict(int)
            for name in dict.fromkeys(name for name, _ in function.arguments if name not in brought):
                placed = self._program.shared.tensors[name]
                if names_in(placed.shape):
                    continue
                key = shape_at(placed.slab, {}), placed.dtype
                if used[key] == len(made[key]):
                    made[key].append(self._pool.take(*key))
                found[name] = made[key][used[key]]
                used[key] += 1
        return found

    def _bound(
        self, signature: Signature, function: DeviceFunction, weights: frozenset[str], between: Mapping[str, MeshTensor]
    ) -> _Bound:
        arguments: list[Argument | None] = [None for _ in range(function.numbers)]
        left: list[tuple[str, str]] = []
        for name, view in function.arguments:
            tensor = self._fixed[name].tensor if name in self._fixed else between.get(name)
            if tensor is None:
                left.append((name, view))
            arguments.append(None if tensor is None else (tensor, view))
        arguments += map(Coord, self._program.shared.coordinates)
        if self._workspace is not None:
            parts = self._program.workspaces[function.name].parts
            arguments += [Inside(self._workspace, *part) for part in parts]
        call = self._program.on().bind(self._program.loaded, arguments, function.name)
        self._calls.append(call)
        own = {name for name, view in left if view != SLAB}.union(function.overwritten)
        inputs = {
            each.name: tuple((placed, placed.is_whole and placed.name not in own) for placed in each.tensors)
            for each in function.inputs
            if each.name not in weights
        }
        counts = {each.name: each.kind for each in function.inputs if each.kind in (SHAPE, NUMBER, OBJECT)}
        brought = {placed.name for own in inputs.values() for placed, _ in own}
        names = dict.fromkeys((*(each.name for each in function.results), *(name for name, _ in left)))
        made = [self._program.shared.tensors[n] for n in names if n not in brought and n not in self._fixed]
        return _Bound(function, inputs, counts, tuple(made), tuple(left), tuple(arguments), call, signature.nesting)

    # ---- Values

    def _new(
        self, placed: Placed, shape: tuple[int, ...], most: Mapping[str, int] | None = None, shared: bool = False
    ) -> Spread:
        """A value of a whole shape; with room for sizes up to `most`, where its shape depends on such."""
        slab, room = self._slabs.get(placed.name), None
        if slab is None:
            slab = local_shape(placed.forms, shape)
            room = room_of(placed, slab, most or {})
            if room is None:  # it is always of that shape
                self._slabs[placed.name] = slab
        tensor = self._pool.take(slab, placed.dtype, shared, room)
        return Spread(shape, placed.dtype, placed.forms, tensor, self._pool)

    def put(self, array: np.ndarray, function: str, param: str) -> tuple[Spread, ...]:
        self._program.on()
        found = []
        bound = self._functions[function]
        for placed, shared in bound.inputs[param]:
            value = self._new(placed, array.shape, bound.of.most, shared)
            self.copied += self._program.scatter(value.tensor, placed.forms, array)
            found.append(value)
        return tuple(found)

    def call(self, function: str, arguments: Sequence[Any]) -> Any:
        bound = self._functions[function]
        objects = self._objects(bound, arguments)
        values, opened = self._values(bound, arguments, objects)
        self._program.on().invoke(bound.call, opened)
        self._put_back(bound, arguments, values)
        results: list[Any] = [values.get(each.name) or self._fixed[each.name] for each in bound.of.results]
        for at, name in bound.of.left:
            results.insert(at, objects[name])
        return _nested(bound.nesting, iter(results))

    def _objects(self, bound: _Bound, arguments: Sequence[Any]) -> dict[str, Kept]:
        """The objects that a call brings, and place for those that it makes, by name."""
        found: dict[str, Kept] = {}
        for name, given in zip(bound.inputs, arguments, strict=True):
            if bound.counts.get(name) == OBJECT:
                if not isinstance(given, Kept):
                    got = "an array" if isinstance(given, Spread) else type(given).__name__
                    raise InputError(
                        f"{bound.of.name}: {name} is an object, one on each device; got {got}: give the handle that a "
                        "function of the session has returned"
                    )
                found[name] = given
        return found | {name: self._places.new() for name in bound.of.objects if name not in found}

    def _values(
        self, bound: _Bound, arguments: Sequence[Any], objects: Mapping[str, Kept]
    ) -> tuple[dict[str, Spread], list[Any]]:
        """What a call brings and leaves, by the names of the tensors; and what its open arguments are."""
        values: dict[str, Spread] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        function = bound.of
        for (name, placed), given in zip(bound.inputs.items(), arguments, strict=True):
            if bound.counts.get(name, OBJECT) != OBJECT:
                shapes[name] = tuple(map(int, given)) if bound.counts[name] == SHAPE else (int(given),)
            for at, (each, _) in enumerate(placed):
                value = given[at] if isinstance(given, tuple) else given  # the former is what `put` has made
                values[each.name] = value if value.forms == each.forms else self._converted(value, each, function)
        sizes: dict[str, int] = {}
        if function.sizes:
            given = {each.name: values.get(each.tensors[0].name) for each in function.inputs if each.tensors}
            shapes |= {name: value.shape for name, value in given.items() if value is not None}
            sizes = sizes_of(function, shapes)
        for needed in bound.made:
            values[needed.name] = self._new(needed, shape_at(needed.shape, sizes), function.most)
        opened = [(values[name].tensor, view) for name, view in bound.open]
        places = (objects[name].place.number for name in function.objects)
        return values, [*(sizes[name] for name in function.sizes), *places, *opened]

    def _converted(self, value: Spread, placed: Placed, function: DeviceFunction) -> Spread:
        found = self._new(placed, value.shape, function.most)
        self._program.convert(value, found.tensor, placed)
        return found

    def _put_back(self, bound: _Bound, arguments: Sequence[Any], values: Mapping[str, Spread]) -> None:
        """What a call has stored to in place of what it was given in another form goes there, too."""
        for own, given in zip(bound.inputs.values(), arguments, strict=True):
            for placed, _ in own:
                value = values[placed.name]
                if placed.name in bound.of.overwritten and isinstance(given, Spread) and given is not value:
                    home = Placed(placed.name, placed.shape, placed.dtype, given.forms)
                    self._program.convert(value, given.tensor, home)

    def time(self, function: str, arguments: Sequence[Any], repeat: int, warmup: int) -> list[float]:
        given, _kept = self._whole(function, arguments)
        return self._program.on().time(self._program.loaded, given, repeat, warmup, function)

    def trace(self, function: str, arguments: Sequence[Any], warmup: int) -> Timeline:
        given, _kept = self._whole(function, arguments)
        program = self._program
        calls = sum(len(block.bindings) for block in program.module[function].body.blocks)
        recordings = program.on().trace(program.loaded, given, calls, warmup, function)
        return model_timeline(function, program.shared.mesh, recordings)

    def _whole(self, function: str, arguments: Sequence[Any]) -> tuple[list[Argument], object]:
        """All that a function is called with, and what is to be kept until it was."""
        bound = self._functions[function]
        objects = self._objects(bound, arguments)
        values, opened = self._values(bound, arguments, objects)
        left = iter(opened)
        return [next(left) if argument is None else argument for argument in bound.arguments], (values, objects)

    def apply(self, function: str, value: Any, arguments: Sequence[Any]) -> int | float | None:
        given = [each.place if isinstance(each, Kept) else each for each in (value, *arguments)]
        return self._program.on().apply(function, given)

    def fetch(self, value: Spread) -> np.ndarray:
        self._program.on()
        return self._program.gather(value)

    def export(self, value: Spread) -> Any:
        return _tvm.as_tensor(self.fetch(value))

    def close(self) -> None:
        self._functions.clear()
        self._fixed.clear()
        self._places.close()
        workers = self._program.workers()
        while self._calls:
            call = self._calls.pop()
            if workers is not None and not workers.closed:
                workers.free(call)
        self._pool.close()


def _nested(nesting: Any, results: Any) -> Any:
    return tuple([_nested(each, results) for each in nesting]) if isinstance(nesting, tuple) else next(results)


def _bytes(placed: Placed) -> int:
    return math.prod(shape_at(placed.slab, {})) * np.dtype(placed.dtype).itemsize
