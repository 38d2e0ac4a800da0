"""A Relax model on a mesh of workers: each device's share of the weights is placed once, and functions are called."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tvm
from tvm.target import Target

from tvm_axe.collective import Timeline, Workers
from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Arrays
from tvm_axe.executable.functions import Model
from tvm_axe.executable.mesh_memory import MeshMemory
from tvm_axe.executable.on_mesh import OnMesh
from tvm_axe.executable.session import Session
from tvm_axe.executable.signatures import Signature
from tvm_axe.executable.spread import ModelProgram
from tvm_axe.executable.weights import matched_weights
from tvm_axe.layout import Layout
from tvm_axe.relax.device import DeviceModule
from tvm_axe.relax.fusing import explained
from tvm_axe.relax.sharing import described, layout_of
from tvm_axe.relax.workspace import Workspace

__all__ = ["MeshModelExecutable", "Told"]

_LOG = logging.getLogger("tvm_axe")


class Told(NamedTuple):
    """What is said of how a model is shared, once that was chosen.

    Attributes
    ----------
    bytes : int
        That the busiest device of each move receives, over all functions.
    lines : tuple[str, ...]
        The forms of values, and what moves them.
    peers : tuple[str, ...]
        The kernels that index the slabs of peers.
    """

    bytes: int
    lines: tuple[str, ...]
    peers: tuple[str, ...]

    @classmethod
    def of(cls, shared: DeviceModule) -> Told:
        """What is said of a model."""
        lines = [described(shared)]
        for function in shared.functions.values():
            chosen = function.chosen
            here, there = chosen.weights
            lines += ["", f"{function.name}: weights of {here:,} bytes a device, {there:,} in all", "", "layouts"]
            placed = [tensor for each in function.inputs for tensor in each.tensors] + list(function.results)
            width = max((len(each.name) for each in placed), default=0)
            lines += [f"  {each.name:<{width}}  {each.shown}" for each in placed]
            lines += ["", "calls (bytes a device)"]
            for choice in chosen.choices:
                for moved in choice.moves:
                    name = chosen.graph.values[moved.value].name
                    lines.append(
                        f"  {moved.how.kind:<15} {name}: {moved.source} -> {moved.target}  {moved.how.bytes:,}"
                    )
                ins, outs = (", ".join(map(str, forms)) for forms in (choice.strategy.ins, choice.strategy.outs))
                transfer, name = choice.transfer, choice.node.name
                if transfer is None:
                    lines.append(f"  {name:<15} {ins} -> {outs}")
                else:
                    how = transfer.how(chosen.link)
                    over = f"over {transfer.axis} {transfer.source} -> {transfer.target}"
                    lines.append(f"  {how.kind:<15} {name}: {over}, {ins} -> {outs}  {how.bytes:,}")
            lines.append(f"  in all          {chosen.bytes:,}")
            met = explained(function.steps, shared.meets)
            kernels = sum(step.func is not None for step in function.steps)
            lines += ["", f"where devices meet, in {kernels} kernels", *(f"  {line}" for line in met)]
        total = sum(function.chosen.bytes for function in shared.functions.values())
        return cls(total, tuple(lines), shared.indexes_peers)


class MeshModelExecutable(OnMesh, Model):
    """A model that devices share, built by the workers that run it.

    Parameters
    ----------
    functions : sequence of Signature
        Of the model as it was given.
    shared : DeviceModule
        What each device runs, and how values lie.
    told : Told
        How they were chosen.
    module : IRModule
        The same module as records left it.
    runnable : IRModule
        The same with tile kernels in the place of the blocks that chose one, which workers build.
    workspaces : mapping
        What the functions of that are called with beside (`tvm_axe.relax.workspace`).
    target, tuned
        See `Executable`.
    attached : mapping, optional
        The weights that the model was imported with, by name.
    packed : bool
        Whether its functions take weights that a session has packed.
    """

    def __init__(
        self,
        functions: Sequence[Signature],
        shared: DeviceModule,
        told: Told,
        module: tvm.IRModule,
        runnable: tvm.IRModule,
        workspaces: Mapping[str, Workspace],
        target: Target,
        tuned: Mapping[str, float],
        attached: Mapping[str, Any] | None = None,
        packed: bool = False,
    ) -> None:
        functions = [each for each in functions if each.name in shared.functions]
        for each in functions:
            function, wanted = shared.functions[each.name], len(_flat(each.nesting))
            found = len(function.results) + len(function.left)
            if found != wanted:
                raise LowerError(
                    f"{each.name}: {wanted - found} of its {wanted} results ({', '.join(each.outputs)}) are no "
                    "tensors, which is what functions return on a mesh: leave shapes and numbers to the caller"
                )
        super().__init__(functions, packed, module, target, tuned)
        self.shared, self.runnable, self.workspaces, self.mesh = shared, runnable, workspaces, shared.mesh
        self.told, self.attached = told, dict(attached or {})
        self.layouts: Mapping[str, Layout] = {
            name: layout
            for name, placed in shared.tensors.items()
            if (layout := layout_of(placed, shared.mesh)) is not None
        }
        self.apart: Callable[[], MeshModelExecutable] | None = None
        """What makes the same of collectives, for devices that don't see each other's memory."""
        self._unfused: MeshModelExecutable | None = None
        self._programs: weakref.WeakKeyDictionary[Workers, ModelProgram] = weakref.WeakKeyDictionary()
        self._memories: weakref.WeakKeyDictionary[Workers, MeshMemory] = weakref.WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        return self.told.bytes

    def show(self) -> str:
        return "\n".join([f"model on mesh {self.mesh}", *self.told.lines, "", self.module.script()])

    def trace(self, *arguments: Any, warmup: int = 3, **named: Any) -> Timeline:
        workers, arrays = self._taken(arguments, named)
        memory = self._memory(workers)
        with memory.lock:
            return memory.trace(self.name, self._put(memory, arrays), warmup)

    # ---- What each kind says of itself

    def _run(self, workers: Workers | None, arrays: Arrays) -> Arrays:
        memory = self._memory(workers)
        with memory.lock:
            results = memory.call(self.name, self._put(memory, arrays))
            return tuple(map(memory.fetch, _flat(results)))

    def _time(self, workers: Workers | None, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        memory = self._memory(workers)
        with memory.lock:
            return memory.time(self.name, self._put(memory, arrays), repeat, warmup)

    def _memory(self, workers: Workers | None) -> MeshMemory:
        """Where the values of runs on whole arrays are on workers, without weights; made at the first."""
        assert workers is not None  # a mesh has them
        if workers not in self._memories:
            memory = MeshMemory(self._program(workers), self.functions)
            memory.place({})
            self._memories[workers] = memory
        return self._memories[workers]

    def _put(self, memory: MeshMemory, arrays: Arrays) -> list[Any]:
        return [memory.put(array, self.name, param.name) for param, array in zip(self._function().params, arrays)]

    def _session(self, params: object, workers: Workers | None, graphs: bool) -> Session:
        if graphs:
            raise LowerError(
                f"{self.name}: graphs are asked for of one GPU; those of a mesh replay what they can by themselves: "
                "leave graphs out"
            )
        weights = matched_weights(self.functions, self.attached or None if params is None else params)
        workers = self._workers() if workers is None else workers
        self._check(workers)
        # The workers may be its own.
        return Session(
            self.name, self.functions, weights, MeshMemory(self._program(workers), self.functions), (self, workers)
        )

    def _program(self, workers: Workers) -> ModelProgram:
        """The model on workers, who build it at the first use."""
        if workers not in self._programs:
            own = self._fitting(workers)
            parts = own.shared, own.runnable, own.workspaces
            self._programs[workers] = ModelProgram(*parts, self.target, workers, self.kept)
        return self._programs[workers]

    def _check(self, workers: Workers) -> None:
        super()._check(workers)
        own = self._fitting(workers)
        if own._is_unseen(workers) and own.told.peers:
            axes, kernels = ", ".join(self.shared.coordinates), ", ".join(own.told.peers)
            raise LowerError(
                f"{self.name}: what no collective deals out is taken by kernels ({kernels}) that index the slabs of "
                f"peers over {axes}, and here these don't see each other's memory; share the model over an axis along "
                "which devices do"
            )

    def _is_unseen(self, workers: Workers) -> bool:
        return any(map(workers.is_apart, self.shared.coordinates))

    def _fitting(self, workers: Workers) -> MeshModelExecutable:
        """The model in the form in which workers can run it: with collectives alone where kernels see no peers."""
        if self.apart is None or not (self._is_unseen(workers) and self.told.peers):
            return self
        if self._unfused is None:
            self._unfused = self.apart()
            _LOG.warning(
                "%s: devices along %s don't see each other's memory; what they move between them collectives move",
                self.name, ", ".join(self.shared.coordinates),
            )  # fmt: skip
        return self._unfused

    def _loading(self) -> str:
        return "model = exe.load(workers, weights)"


def _flat(results: Any) -> list[Any]:
    return [each for result in results for each in _flat(result)] if isinstance(results, tuple) else [results]
