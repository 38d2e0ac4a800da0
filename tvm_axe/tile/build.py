"""Tile programs compiled: `compile` gives something that is called with arrays or tensors.

Compiling needs no GPU. For one, the device code is compiled at once, by nvcc or nvrtc, and kept on disk with all other
compiled kernels (`tvm_axe.machines.cache`); of a kernel for a CPU the optimised LLVM code is kept, which needs no
linker.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.target import Target

from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import Built, backend_of, cache, resolve_target
from tvm_axe.machines.builder import builder_named
from tvm_axe.machines.timing import timed
from tvm_axe.notebook import preformatted
from tvm_axe.tile import lowering
from tvm_axe.tile.arguments import Binder, parameters
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.knobs import declared
from tvm_axe.tile.plans import Plan
from tvm_axe.tile.profiling import Profile, Samples
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reading import read

_RECORDS = "tvm_axe.records.knobs:recorded_knobs"
"""The name of what knows records, which lie above tile programs."""


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

    def __init__(self, decided: Plan, built: Built) -> None:
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
            except (TypeError, ValueError, RuntimeError):
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
        return timed(self._built.module, self.name, self._device, bound.values, repeat, warmup)

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
            The target isn't one of CUDA's GPUs, or the program is one of a mesh.
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
        that GPU's, such as libtvm_runtime_cuda, too, and is exported where such a GPU is.

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
            self._built.module.export_library(str(path))
        except (OSError, RuntimeError) as error:
            raise InputError(f"export: {path} can't be linked, for which cc or g++ is needed: {error}") from error

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
        backend = tile_backend_of(self.target)
        made = backend.compiled(self._plan, self._built)
        made += [f"slow: {what}" for what in backend.slow(self._plan, self._built)]
        return "\n".join([self._plan.explain(), *(["compiled"] if made else []), *(f"    {line}" for line in made)])

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


def compile(
    program: tirx.PrimFunc | TileProgram,
    target: str | Mapping[str, Any] | Target = "llvm",
    store: cache.Cache | None = None,
    *,
    knobs: Mapping[str, int] | None = None,
    work_dir: str | Path | None = WORK_DIR,
) -> TileExecutable:
    """Compile a tile program.

    Parameters
    ----------
    program : PrimFunc or TileProgram
        A tile program (`tvm_axe.tile.kernel`), as written or as read.
    target : str | dict | Target
        As `tvm_axe.machines.resolve_target` takes it: ``"llvm"`` for this machine's CPU, ``"cuda"`` for its GPU, or
        for Hopper where there is none.
    store : Cache, optional
        Where compiled code is kept, instead of the user's cache folder.
    knobs : mapping from str to int, optional
        What the program's knobs are (`tvm_axe.tile.knobs`); those that are left out have their defaults then.
    work_dir : path, optional
        Where records of `tvm_axe.tune` lie. Without `knobs`, a program with knobs has those of its fastest record for
        the target, or its defaults if there is none; None leaves all untuned.

    Raises
    ------
    InputError
        There is no such knob or value, or the program doesn't allow them together.
    TileError
        The program is malformed, the target cannot run it, or there is no compiler for CUDA source.
    """
    if isinstance(program, tirx.PrimFunc) and declared(program):
        program = _chosen(program, _resolved(target), knobs, work_dir)
    elif knobs:
        name = program.name if isinstance(program, TileProgram) else program.attrs["global_symbol"]
        why = "it was read, which is where they are set" if isinstance(program, TileProgram) else "it declares none"
        raise InputError(f"{name}: no knobs can be set, {', '.join(knobs)} neither: {why}")
    return compile_all([program], target, store)[0]


def _chosen(
    program: tirx.PrimFunc, target: Target, knobs: Mapping[str, int] | None, work_dir: str | Path | None
) -> TileProgram:
    """A program with its knobs as they are given, recorded, or by default."""
    if knobs is not None or work_dir is None:
        return read(program, knobs)
    found = builder_named(_RECORDS)(program, target, work_dir)
    if found is None:
        return read(program)
    values, seconds = found
    own = {knob.name: values.get(knob.name, knob.default) for knob in declared(program)}
    return read(program, own, f"the fastest recorded, {1e3 * seconds:.3g} ms")


def _resolved(target: str | Mapping[str, Any] | Target) -> Target:
    return resolve_target(dict(target) if isinstance(target, Mapping) else target)


def compile_all(
    programs: Sequence[tirx.PrimFunc | TileProgram],
    target: str | Mapping[str, Any] | Target = "llvm",
    store: cache.Cache | None = None,
) -> list[TileExecutable]:
    """Compile tile programs together: one compilation for the GPU instead of one each.

    Knobs are as a program was read with, or as their defaults have them.

    Raises
    ------
    TileError
        As `compile`, or two of them have one name.
    """
    resolved = _resolved(target)
    plans = [lowering.plan(program, resolved) for program in programs]
    names = [decided.program.name for decided in plans]
    if len(set(names)) < len(names):
        raise TileError(f"compile: programs have names of their own, got {', '.join(names)}")
    functions = [lowering.emit(decided) for decided in plans]
    mod = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in zip(names, functions)})
    store = cache.Cache() if store is None else store
    overlap = all(decided.overlaps for decided in plans)
    backend = tile_backend_of(resolved)
    built = backend.build(mod, resolved, store, overlap)
    for decided in plans:
        for what in backend.slow(decided, built):
            warnings.warn(f"{decided.program.name}: slower than it need be: {what}", stacklevel=3)
    return [TileExecutable(decided, built) for decided in plans]
