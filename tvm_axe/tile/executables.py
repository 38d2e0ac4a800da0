"""Compiled tile programs: what is called with arrays or tensors, timed, profiled, exported and explained.

A function of several kernels is a `SequenceExecutable`: called as one, with the same arguments. On a GPU it is given
its scratch by `tvm_axe.tile.allocating`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.runtime import Module

from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import Built, backend_of, cache
from tvm_axe.machines.timing import timed
from tvm_axe.notebook import preformatted
from tvm_axe.tile.allocating import Scratch
from tvm_axe.tile.arguments import Binder, parameters
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.plans import Plan, SequencePlan
from tvm_axe.tile.profiling import Profile, Samples
from tvm_axe.tile.sequencing import in_sequence, kernels_of, takes_scratch

__all__ = ["SequenceExecutable", "TileExecutable", "executable"]


class TileExecutable:
    """A compiled tile program: called with a tensor or a number for each parameter, it fills the outputs in place.

    Tensors are numpy arrays, TVM's tensors or anything else with ``__dlpack__``, such as PyTorch's. On a GPU, tensors
    that are there are used where they are, on PyTorch's current stream, and the call returns at once; numpy arrays are
    copied there and back. Tensors are dense, in row-major order, and arrays in another are copied too; those of a
    parameter with strides have its strides, arrays as well, but along dimensions of one element, where they may be any.

    Attributes
    ----------
    name : str
        The function's name.
    target : Target
        What it was compiled for, complete.
    """

    def __init__(self, decided: Plan | SequencePlan, built: Built) -> None:
        self.name = decided.program.name
        self.target = decided.target
        self._plan, self._built = decided, built
        self._backend = backend_of(self.target)
        self._device = tvm.runtime.device(self._backend.device)
        self._binder = Binder(self.name, parameters(decided.program), self._backend, decided.program.assumptions)

    def __call__(self, *arguments: Any) -> None:
        """Run once.

        Raises
        ------
        InputError
            The arguments don't fit the parameters, or there is no GPU to run on.
        """
        values = self._binder.quick(arguments) if self._runs else None
        if values is not None:
            try:
                self._function(*values)
            except (TypeError, ValueError, RuntimeError, IndexError):
                self._bind(arguments)  # which says what doesn't fit
                raise
            return
        bound = self._bind(arguments)
        self._function(*bound.values)
        for step in bound.afterwards:
            step()

    def bind(self, *arguments: Any) -> Callable[[], None]:
        """Return what runs the program on these tensors and numbers again and again, which are checked once.

        It may be called as long as the tensors are there, which it keeps.

        Raises
        ------
        InputError
            As a call; or an argument is a numpy array that is copied for each run.
        """
        bound = self._bind(arguments)
        if bound.copied:
            raise InputError(
                f"{self.name}: {', '.join(bound.copied)} would be copied for each run; bind takes tensors of "
                f"{self._backend.device}, and on a CPU arrays that are dense or have the parameter's strides, are "
                f"writable and begin at a multiple of {self._backend.alignment} bytes"
            )
        return functools.partial(self._function, *bound.values)

    @functools.cached_property
    def _function(self) -> Any:
        """The compiled function, which to look up takes longer than to call."""
        return self._built.module[self.name]

    def time(self, *arguments: Any, repeat: int = 20, warmup: int = 3) -> list[float]:
        """Seconds of each of `repeat` runs, on a GPU by its own clock; nothing is flushed from caches in between.

        Raises
        ------
        InputError
            As a call; or if `repeat` or `warmup` is too small.
        """
        bound = self._bind(arguments)
        return timed(self._built.module, self.name, self._device, self._whole(bound.values), repeat, warmup)

    def _whole(self, values: Sequence[Any]) -> Sequence[Any]:
        """What the compiled function is called with, of the values of the parameters."""
        return values

    def profile(self, *arguments: Any, blocks: int = 8, most: int = 1024, warmup: int = 1) -> Profile:
        """Run on a GPU of NVIDIA's, and see where each role of a block waits, and how long.

        The kernel is compiled once more, with clocks around its waits: loads, free slots of rings, products, other
        warps, flags. They are read by one thread of a role, which costs a few cycles a wait.

        Parameters
        ----------
        *arguments
            As a call's. The program has run `warmup` times and once more afterwards.
        blocks : int
            How many of the blocks, the first to be launched, are looked at.
        most : int
            How many waits of a role in a block there is room for.
        warmup : int
            How many times it runs before.

        Raises
        ------
        InputError
            As a call; or `blocks` or `most` is less than 1, or `warmup` less than 0.
        TileError
            The target isn't one of CUDA's GPUs, or the program is one of a mesh, or has several kernels.
        """
        if blocks < 1 or most < 1 or warmup < 0:
            raise InputError(
                f"profile: blocks and most are at least 1, warmup at least 0, got {blocks}, {most} and {warmup}"
            )
        bound = self._bind(arguments)
        built, samples = self._sampled(blocks, most)
        function, device = built.module[self.name], self._device
        for _ in range(warmup + 1):
            words = tvm.runtime.tensor(np.zeros(samples.size, "int64"), device)
            function(*bound.values, words)
        device.sync()
        for step in bound.afterwards:
            step()
        return samples.read(self.name, words.numpy())

    def _sampled(self, blocks: int, most: int) -> tuple[Built, Samples]:
        """The program compiled so that it writes down its waits."""
        assert isinstance(self._plan, Plan)
        backend = tile_backend_of(self.target)
        func, samples = backend.sampled(self._plan, blocks, most)
        mod = tvm.IRModule({self.name: func.with_attr("global_symbol", self.name)})
        return backend.build(mod, self.target, cache.Cache(), self._plan.overlaps), samples

    def export(self, path: str | Path) -> None:
        """Write a shared library that programs without Python load and call.

        In C++, ``tvm::ffi::Module::LoadFromFile(path)->GetFunction(name).value()`` is a function that takes a
        ``DLTensor*`` for each tensor and a number for each scalar, and throws ``tvm::ffi::Error`` where they don't fit.
        Tensors begin at a multiple of 64 bytes, as TVM allocates them, which on a CPU nobody checks, and sizes are as
        the program assumes (`tvm_axe.tile.assume`), which nobody checks at all. Strides are a parameter's along all
        dimensions, those of one element too; where elements of what is written overlap, it throws.
        Such programs link libtvm_ffi and TVM's runtime, libtvm_runtime, which has the threads; a kernel for a GPU needs
        that GPU's, such as libtvm_runtime_cuda, too, and is exported where such a GPU is. There scratch of several
        kernels is the runtime's workspace of the calling thread, whose calls have to be on one stream, or in an order.

        Parameters
        ----------
        path : path
            The file, which ends in ``.so``; what is there is replaced.

        Raises
        ------
        InputError
            The name has another ending, the file can't be written, no C compiler links it, or there is no such GPU.
        """
        path = Path(path)
        if path.suffix != ".so":
            raise InputError(f"export: {path} is no name of a shared library, which ends in .so")
        if not path.parent.is_dir():
            raise InputError(f"export: there is no folder {path.parent}")
        if not self._runs:
            raise InputError(f"export: {self.name} for {self._backend.name} is exported where such a GPU is")
        try:
            self._exported().export_library(str(path))
        except (OSError, RuntimeError) as error:
            raise InputError(f"export: {path} can't be linked, for which cc or g++ is needed: {error}") from error

    def _exported(self) -> Module:
        """The compiled function as programs without Python call it."""
        return self._built.module

    @property
    def source(self) -> str:
        """The CUDA source of the kernel, or its LLVM code."""
        return str(self._built.module.inspect_source("ll")) if self._built.source is None else self._built.source

    @property
    def knobs(self) -> dict[str, int]:
        """What the program's knobs are (`tvm_axe.tile.knobs`), by name; `explain` says why."""
        return {setting.knob.name: setting.value for setting in self._plan.program.knobs}

    def explain(self) -> str:
        """Every decision about the program on its target, a line each, with its reason, and what came of them.

        For a GPU of NVIDIA's that is what the assembler gave a thread, and how many blocks a multiprocessor runs then.
        """
        made = self._made()
        return "\n".join([self._plan.explain(), *(["compiled"] if made else []), *(f"    {line}" for line in made)])

    def _made(self) -> list[str]:
        """What came of the decisions, a line each."""
        backend, lines = tile_backend_of(self.target), list[str]()
        several = isinstance(self._plan, SequencePlan)
        for plan, built in kernels_of(self._plan, self._built):
            found = backend.compiled(plan, built)
            found += [f"slow: {what}" for what in backend.slow(plan, built)]
            lines += [f"{plan.program.name}: {line}" if several else line for line in found]
        return lines

    def __repr__(self) -> str:
        return f"<an executable of the tile program {self.name}, for {self._backend.name}; explain() says more>"

    def _repr_html_(self) -> str:
        return preformatted(self.explain())

    def _bind(self, arguments: Sequence[Any]) -> Any:
        if not self._runs:
            raise InputError(f"{self.name} was compiled for {self._backend.name}; this machine has no GPU")
        return self._binder.bind(arguments)

    @functools.cached_property
    def _runs(self) -> bool:
        """Whether this machine has what the program was compiled for, which to ask takes a call of the driver."""
        return self._backend.on_host or bool(self._device.exist)


class SequenceExecutable(TileExecutable):
    """A compiled function of several kernels, which is called as one; see `TileExecutable`.

    On a GPU each call is given scratch that no other call uses at the same time (`tvm_axe.tile.allocating`).
    """

    def __init__(self, decided: SequencePlan, built: Built) -> None:
        super().__init__(decided, built)
        self._sequence = decided
        self._scratch = Scratch(decided.program, self._backend.device) if takes_scratch(decided) else None

    @functools.cached_property
    def _function(self) -> Any:
        function, scratch = self._built.module[self.name], self._scratch
        if scratch is None:
            return function
        return lambda *values: function(*values, *scratch.new(values))

    def _whole(self, values: Sequence[Any]) -> Sequence[Any]:
        return values if self._scratch is None else [*values, *self._scratch.new(values)]

    def _sampled(self, blocks: int, most: int) -> tuple[Built, Samples]:
        kernels = ", ".join(kernel.name for kernel in self._sequence.program.kernels)
        raise TileError(
            f"profile: {self.name} has the kernels {kernels}; valid is one, compiled by itself: tile.compile of one of "
            "tile.read_sequence(...).kernels, with a tensor for each scratch"
        )

    def _exported(self) -> Module:
        if self._scratch is None:
            return self._built.module
        mod = tvm.IRModule({self.name: in_sequence(self._sequence)})
        return self._backend.build(mod, self.target, cache.Cache(), self._sequence.overlaps).module


def executable(decided: Plan | SequencePlan, built: Built) -> TileExecutable:
    """What is called, of a plan and what was built of it."""
    return SequenceExecutable(decided, built) if isinstance(decided, SequencePlan) else TileExecutable(decided, built)
