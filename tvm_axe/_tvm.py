"""The one place that touches upstream's private or unstable API.

Written against apache-tvm 0.27.0.post1. Everything else in the package uses upstream's public names only, so that a
new release is met here and nowhere else. Sections: Disco, TensorIR, targets, MetaSchedule, TIR, tile programs.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import tvm
import tvm.tirx.script.builder as _tirx_builder
import tvm_ffi
from tvm import ir, relax, runtime, s_tir, tirx
from tvm.backend.cuda import op as _cuda_op
from tvm.backend.cuda.tile_primitive import tma_utils as _tma_utils
from tvm.error import DiagnosticError
from tvm.ir import IRModule
from tvm.relax.backend.cpu_generic import pipeline as _cpu_pipeline
from tvm.relax.backend.cuda import pipeline as _cuda_pipeline
from tvm.runtime.disco import _ffi_api as _disco_ffi
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.analysis import estimate_tir_flops as _estimate_tir_flops
from tvm.s_tir.meta_schedule import _ffi_api as _ms_ffi
from tvm.s_tir.meta_schedule import logging as _ms_logging
from tvm.s_tir.meta_schedule import utils as _ms_utils
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.s_tir.schedule import _ffi_api as _schedule_ffi
from tvm.script import ir_builder as _ir_builder
from tvm.support import nvcc as _nvcc
from tvm.target import Target
from tvm.target import codegen as _codegen
from tvm.tirx import TensorMapType
from tvm.tirx import layout as _upstream_layout
from tvm.tirx.build import codegen_build, split_host_device_mods
from tvm.tirx.operator import tile_primitive as _tile_primitive

# ---- Disco -------------------------------------------------------------------------------------------------------

DISCO_EXECUTE = "axe.execute"  # the one function that a session calls: (launch, sequence, command) -> None
_DISCO_POOL = "axe.process_pool"


def register_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Make Python functions known to the runtime by their names; compiled programs may then call them."""
    for name, function in functions.items():
        tvm_ffi.register_global_func(name, function, override=True)


# Upstream fills this module in before the library with its functions is loaded, that is, with nothing.
tvm_ffi.init_ffi_api("runtime.disco", _disco_ffi.__name__)


def _process_pool(num_workers: int, num_groups: int, pipes: str) -> Callable[[int], Any]:
    """Upstream's hook for starting processes: ours run already, `pipes` is JSON of their (read, write) descriptors."""
    descriptors = json.loads(pipes)
    return lambda worker: tvm_ffi.Shape(descriptors[worker - 1]) if worker else None


register_functions({_DISCO_POOL: _process_pool})


class DiscoSession:
    """A Disco session that calls `DISCO_EXECUTE` on all its workers and never waits for one in C++.

    Parameters
    ----------
    size : int
        The number of workers. Worker 0 is a thread of this process.
    pipes : list of (int, int), optional
        For each of the other workers, which run as processes, the descriptors to read from and to write to it. They
        must stay open, and the worker's ends too, for as long as the session lives: it ends this process when a write
        fails, and it writes until it is gone. Without, all the workers are threads of this process.
    """

    def __init__(self, size: int, pipes: Sequence[tuple[int, int]] | None = None) -> None:
        if pipes is None:
            self._session = _disco_ffi.SessionThreaded(size, 1)
        else:
            self._session = _disco_ffi.SessionProcess(size, 1, _DISCO_POOL, json.dumps(pipes))
        self._execute = self._session.get_global_func(DISCO_EXECUTE)

    def send(self, launch: str, sequence: int, command: str) -> None:
        """Have every worker run a command; returns at once."""
        self._session.call_packed(self._execute, launch, sequence, command)

    def sync(self, threads: Sequence[int]) -> None:
        """Wait until `threads`, workers of this process that have answered their commands, are back from Python."""
        for rank in threads:
            self._session._sync_worker(rank)

    def close(self, threads: Sequence[int]) -> None:
        """Tell the workers to stop and wait for `threads`, those of this process, which must have done their commands.

        The session's destructor waits for the threads too, but with the interpreter locked; a thread that has yet to
        return from Python would never come out.
        """
        self.sync(threads)
        del self._execute, self._session

    def leak(self) -> None:
        """Never destroy the session, because a thread of it can't be waited for."""
        for held in (self._execute, self._session):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def disco_serve(rank: int, size: int, read: int, write: int) -> None:
    """Be worker `rank` of a session in another process until it is closed."""
    tvm_ffi.get_global_func("runtime.disco.WorkerProcess")(rank, size, 1, read, write)


def disco_rank() -> int:
    """The rank of the Disco worker that the calling thread is."""
    return tvm_ffi.get_global_func("runtime.disco.worker_rank")()


def use_threads(count: int, cores: Sequence[int]) -> None:
    """Give the calling thread `count` threads for parallel loops (itself one of them), on any of the `cores`.

    Left alone, upstream would bind the n-th thread of every pool to the n-th core and, with one thread, the caller to
    core 0: the workers of a machine would share its first cores while the others idle.
    """
    share = -3  # threading::ThreadGroup::kSpecifyThreadShareAllCore
    configure = tvm_ffi.get_global_func("runtime.config_threadpool")
    names = [str(core) for core in cores]
    configure(share, count, names[:count], count)  # the first call makes the pool, with a thread for each core named
    configure(share, count, names, count)
    os.sched_setaffinity(0, cores)


class _Import:
    """An array as a DLPack producer, for `tvm_ffi.from_dlpack`; numpy itself can't export the small float types."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __dlpack__(self, **options: Any) -> Any:
        array = self._array.view(f"u{self._array.itemsize}")
        # numpy calls a single slab dense whatever its distance to the next, and before 2.3 exports no strides then; of
        # two slabs it does, and nothing is read to export them.
        alone = array.ndim > 1 and array.shape[0] == 1
        if alone:
            array = np.lib.stride_tricks.as_strided(array, (2, *array.shape[1:]), self._array.strides)
        capsule = array.__dlpack__()
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        if alone:
            tensor.shape[0] = 1
        dtype = tvm_ffi.dtype(self._array.dtype.name)
        tensor.code, tensor.bits = int(dtype.type_code), dtype.bits
        return capsule


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def as_tensor(array: np.ndarray) -> tvm_ffi.Tensor:
    """A tensor over the array's memory, strides and all; upstream's `from_dlpack` takes dense arrays only."""
    return tvm_ffi.from_dlpack(_Import(array))


class _Export:
    """A tensor's memory for numpy; keeps the tensor."""

    def __init__(self, tensor: tvm_ffi.Tensor, itemsize: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple([stride * itemsize for stride in tensor.strides]),
            "typestr": f"|V{itemsize}",
            "data": (tensor.data_ptr(), False),
        }


_numpy_type = functools.cache(np.dtype)


def as_array(tensor: tvm_ffi.Tensor) -> np.ndarray:
    """An array over a CPU tensor's memory, whatever its type; upstream's `numpy()` copies."""
    dtype = _numpy_type(str(tensor.dtype))
    return np.asarray(_Export(tensor, dtype.itemsize)).view(dtype)


# ---- TensorIR ----------------------------------------------------------------------------------------------------


def block_realize(sch: s_tir.Schedule, block: SBlockRV) -> s_tir.SBlockRealize:
    """The block with the expressions that its iterators are bound to; the public `sch.get` leaves them out."""
    return _schedule_ffi.GetSBlockRealize(sch, block)


def statement(sch: s_tir.Schedule, rv: SBlockRV | LoopRV) -> Any:
    """The block or loop that a handle stands for; the public `sch.get` looks at types for sixty times as long."""
    return _schedule_ffi.ScheduleGet(sch, rv)


def put_back(sch: s_tir.Schedule, before: s_tir.Schedule) -> None:
    """Have a schedule be what its copy `before` is, which is used up: state, trace, and what the handles stand for.

    The object in Python is; in C++ it is another. So whoever wrote a rule in Python that MetaSchedule calls, and that
    goes on after an error, has to return the schedule, as such a rule does.
    """
    sch.__move_handle_from__(before)


def schedule_error_reason(error: Exception) -> str:
    """The sentence of a schedule error that says what was wrong, without the rendered module before it."""
    _, found, reason = str(error).rpartition("Error message:")
    return " ".join(reason.split()).removeprefix("ScheduleError: ") if found else str(error)


def plain(value: Any) -> Any:
    """What a trace's `as_json` returns as lists, strings and numbers of Python's own."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    if isinstance(value, tirx.IndexMap):
        return str(ir.save_json(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value


_FLOATS = re.compile(r"(?:bfloat|float)\d+(?:_\w+?)?(x\d+)?")


def widened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with every type of floating point float64: parameters, buffers, constants, casts and calls.

    A constant stays the number that its own type rounds it to.
    """
    graph = json.loads(str(ir.save_json(func)))
    nodes = graph["nodes"]
    for node in nodes:
        if node["type"] == "ir.FloatImm":
            held = np.dtype(nodes[node["data"]["ty"]]["data"]["dtype"])
            with np.errstate(over="ignore"):
                node["data"]["value"] = float(np.asarray(node["data"]["value"]).astype(held))
    for node in nodes:
        found = _FLOATS.fullmatch(node["data"]["dtype"]) if node["type"] == "ir.PrimType" else None
        if found:
            node["data"]["dtype"] = "float64" + (found[1] or "")
    return ir.load_json(json.dumps(graph))


UPSTREAM_ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
"""What upstream's C++ raises at a candidate or a record that it can't take; `why_refused` tells it from a fault.

Its ``InternalError`` and ``ScheduleError`` are of the first, our own `tvm_axe.errors.AxeError` of the first two.
"""

_REFUSALS = (RuntimeError, ValueError, MemoryError, OSError)


def is_own_fault(error: BaseException) -> bool:
    """Whether an error is a fault of the code, and says nothing of the candidate or the file that was being looked at.

    A RuntimeError, ValueError, MemoryError or OSError is none, nor is what upstream's C++ raises, or Python of its own
    below that. An error of another class that passes through its C++ becomes a plain RuntimeError; so such a one, if it
    was raised in Python that isn't upstream's, is a fault too.
    """
    crossed = getattr(error, "__tvm_ffi_error__", None)
    if crossed is None:
        return not isinstance(error, _REFUSALS)
    raised = re.match(r'\s*File "(.+\.py)", line', str(crossed.backtrace))
    if raised is None or Path(raised[1]).is_relative_to(Path(tvm.__file__).parent):
        return False
    return type(error) is RuntimeError or not isinstance(error, _REFUSALS)


def raise_own_fault(error: Exception) -> None:
    """Raise an error that was caught again if it is a fault of the code (`is_own_fault`), which is nobody's result."""
    if is_own_fault(error):
        raise error


def why_refused(error: Exception) -> str:
    """Why upstream refuses a candidate or a record, in one sentence; a fault of the code is raised again."""
    raise_own_fault(error)
    return schedule_error_reason(error)


# ---- Targets -----------------------------------------------------------------------------------------------------


def host_triple() -> str:
    """LLVM's triple of this host."""
    return str(_codegen.llvm_get_system_triple())


def system_cpu() -> str:
    """LLVM's name of this host's CPU, whether or not the running system lets all of it be used."""
    return str(_codegen.llvm_get_system_cpu())


def is_valid_cpu(name: str, triple: str) -> bool:
    """Whether LLVM knows the CPU; the code generator only logs an unknown one, and compiles for a generic CPU."""
    return bool(_codegen.llvm_is_valid_cpu(name, triple))


def cpu_features(target: Target) -> frozenset[str]:
    """LLVM's names of what the target's CPU has, such as ``avx512f``."""
    return _cpu_features(str(target))


@functools.cache
def _cpu_features(target: str) -> frozenset[str]:
    return frozenset(str(name) for name in _codegen.llvm_get_cpu_features(Target(json.loads(target))))


# ---- MetaSchedule ------------------------------------------------------------------------------------------------


def tune_context(
    mod: IRModule,
    target: Target,
    space: ms.SpaceGenerator,
    strategy: ms.SearchStrategy,
    name: str,
    seed: int,
    threads: int,
    logger: logging.Logger,
) -> ms.TuneContext:
    """A `TuneContext`; its own constructor imports every tensor intrinsic of every target first, which takes 13 s."""
    context: ms.TuneContext = ms.TuneContext.__new__(ms.TuneContext)
    context.__init_handle_by_constructor__(
        _ms_ffi.TuneContext, mod, target, space, strategy, name, threads, seed, _ms_logging.get_logging_func(logger)
    )
    _ms_ffi.TuneContextInitialize(context)
    return context


def record_json(record: ms.database.TuningRecord) -> list[Any]:
    """A record as MetaSchedule's databases write it; its own `as_json` refuses traces with `transform_layout`."""
    return plain(_ms_ffi.TuningRecordAsJSON(record))


def workload_hash(mod: IRModule) -> str:
    """The structural hash as MetaSchedule's JSON databases write it; names of blocks, buffers and loops don't count."""
    return str(int(_ms_utils.shash2hex(mod), 16))


def structural_equal(a: IRModule, b: IRModule) -> bool:
    """Whether two modules are the same up to names."""
    return bool(tvm_ffi.structural_equal(a, b))


def flops(mod: IRModule) -> float:
    """Arithmetic operations that a call does, as upstream estimates them; 0 where it can't count them."""
    try:
        return float(_estimate_tir_flops(mod))
    except (RuntimeError, ValueError, TypeError):
        return 0.0


# ---- Relax -------------------------------------------------------------------------------------------------------


def split_preproc(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    """The blocks of a function that upstream's `SplitLayoutRewritePreproc` splits off, and the function without them.

    The pass acts on functions that Relax calls, so one is made that calls this; it takes every parameter there for an
    argument, as an output need not be the last.
    """
    params = [
        relax.Var(f"p{n}", relax.TensorType(param.ty.shape, param.ty.dtype)) for n, param in enumerate(func.params)
    ]
    builder = relax.BlockBuilder()
    callee = builder.add_func(func.with_attr("global_symbol", "main"), "split")
    with builder.function("caller", params):
        builder.emit_func_output(builder.emit(relax.call_tir(callee, params, out_ty=params[-1].ty)))
    parts = relax.transform.SplitLayoutRewritePreproc()(builder.get())
    return parts["split_weight_prepack"], parts["split_prepacked"]


_PIPELINES = {"cpu": _cpu_pipeline, "cuda": _cuda_pipeline}


def relax_lowering(target: Target, device: str) -> list[ir.transform.Pass]:
    """The passes of upstream's pipeline for a device that come after operators have become kernels.

    Only the pipelines' modules export them.
    """
    pipeline = _PIPELINES[device]
    return [*pipeline.dataflow_lower_passes(target), *pipeline.finalize_passes(target)]


# ---- TIR: calling a function on part of a buffer ------------------------------------------------------------------


def tensor_argument(buffer: tirx.Buffer, start: tirx.Expr | None, shape: Sequence[int]) -> tirx.Expr:
    """The argument of a packed call that is a dense tensor of `shape` whose first element is ``buffer[start, 0, ...]``.

    A buffer as an argument is passed whole, and with an element offset, which the callee would refuse.
    """
    data = buffer.data if start is None else tirx.address_of(tirx.BufferLoad(buffer, [start] + [0] * (len(shape) - 1)))
    extents = tirx.call_intrin("handle", "tirx.tvm_stack_make_shape", *shape)
    zero = tirx.const(0, buffer.dtype)
    return tirx.call_intrin("handle", "tirx.tvm_stack_make_array", data, extents, 0, len(shape), zero, 0)


# ---- Building -----------------------------------------------------------------------------------------------------

_CREATE_CUDA = "ffi.Module.create.cuda"  # (code, its format, functions, sources) -> module; only where a driver is
_OVERLAP = "tirx.use_programtic_dependent_launch"  # the runtime's spelling


def register_pipeline(name: str, base: str, host_pass: ir.transform.Pass) -> None:
    """Make a pipeline for ``tvm.compile(..., tir_pipeline=name)``: upstream's `base`, with one pass more.

    Host functions pass through it when intrinsics have become LLVM's; those that it brings in are lowered after it.
    """

    def pipeline() -> tuple[Any, Any, Any]:
        lower, finish_host, finish_device = tirx.get_tir_pipeline(base)
        last = [host_pass, tirx.transform.LowerIntrin()]
        return lower, lambda: ir.transform.Sequential([finish_host(), *last]), finish_device

    tirx.register_tir_pipeline(name, pipeline)


def build_cuda(
    mod: IRModule, target: Target, to_cubin: Callable[[str], bytes], overlap: bool = False, pipeline: str = "tirx"
) -> tuple[runtime.Module, str]:
    """Build a module of CUDA functions by one of upstream's pipelines; returns what can be run, and the CUDA source.

    The steps are those of `tvm.tirx.build`, but for the device's module, which is made of what `to_cubin` compiles. On
    a machine without a CUDA driver the result's functions can't be called. With `overlap` a kernel is launched while
    the one before it still runs; each must wait for that one (``griddepcontrol.wait``) before it touches global memory.
    """
    lower, finish_host, finish_device = tirx.get_tir_pipeline(pipeline)
    host_target = Target("llvm") if target.host is None else target.host
    host, devices = split_host_device_mods(lower(tirx.transform.BindTarget(target.with_host(host_target))(mod)))
    ((device_target, device),) = devices.items()
    device = finish_device()(device)
    # Where there is a driver, this compiles the source too, by nvrtc; upstream has no other way to it.
    generated = codegen_build(device, device_target)
    source = str(generated.inspect_source())
    cubin = to_cubin(source)
    create = tvm_ffi.get_global_func(_CREATE_CUDA, allow_missing=True)
    if create is not None:
        tags = [_OVERLAP] if overlap else []
        infos = [_function_info(func, tags) for func in device.functions.values()]
        generated = create(cubin, "cubin", {info.name: info for info in infos}, {"cuda": source})
    built = codegen_build(finish_host()(host), host_target)
    built.import_module(generated)
    return built, source


def _function_info(func: tirx.PrimFunc, tags: Sequence[str]) -> Any:
    """What the runtime has to know of a kernel to launch it, with launch parameters beside those of the compiler.

    Upstream makes it in its code generator, and has no constructor of it in Python.
    """
    nodes: list[dict[str, Any]] = []

    def add(type: str, data: Any) -> int:
        nodes.append({"type": type, "data": data})
        return len(nodes) - 1

    def array(type: str, items: Sequence[Any]) -> int:
        return add("ffi.Array", [add(type, item) for item in items])

    kinds = [param.ty for param in func.params]
    pointers = [isinstance(kind, ir.PointerType) for kind in kinds]
    types = ["handle" if pointer else str(kind) for kind, pointer in zip(kinds, pointers)]
    maps = [pointer and isinstance(kind.element_type, TensorMapType) for kind, pointer in zip(kinds, pointers)]
    launch = [*tags, *(str(tag) for tag in func.attrs["tirx.kernel_launch_params"])]
    data = {
        "name": add("ffi.String", str(func.attrs["global_symbol"])),
        "arg_types": array("DataType", types),
        "launch_param_tags": array("ffi.String", launch),
        "arg_extra_tags": array("int", [int(is_map) for is_map in maps]),
    }
    root = add("runtime.FunctionInfo", data)
    return ir.load_json(json.dumps({"root_index": root, "nodes": nodes, "metadata": {}}))


def nvrtc_version() -> str | None:
    """The version of nvrtc, or None where its library or its bindings aren't installed."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the bindings raise the latter where the library is missing
        return None
    return f"{major}.{minor}"


def nvrtc_cubin(source: str, arch: str) -> bytes:
    """CUDA source compiled by nvrtc, with upstream's flags."""
    return bytes(_nvcc.compile_cuda(source, target_format="cubin", arch=arch, compiler="nvrtc"))


def save_llvm(module: runtime.Module) -> bytes:
    """A host module as LLVM bitcode, already optimised."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "module.bc")
        module.write_to_file(path, "bc")
        with open(path, "rb") as file:
            return file.read()


def load_llvm(bitcode: bytes) -> runtime.Module:
    """What `save_llvm` saved, to be run."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "module.bc")
        with open(path, "wb") as file:
            file.write(bitcode)
        return tvm_ffi.get_global_func("ffi.Module.load_from_file.ll")(path, "ll")


# ---- TIRx: tile primitives, layouts and intrinsics ---------------------------------------------------------------


def register_dispatch(*args: Any, **kwargs: Any) -> Callable[[Callable], Callable]:
    """Upstream's decorator: how a tile primitive is lowered on a target, and when."""
    return _tile_primitive.register_dispatch(*args, **kwargs)


def dispatch_predicate(name: str, test: Callable[[Any, Any], tuple[bool, str]]) -> Any:
    """A named condition of `register_dispatch`, which gives whether a call meets it and what was seen."""
    return _tile_primitive.predicate(name, test)


def swizzled_layout(dtype: str, swizzle: int, shape: Sequence[int]) -> Any:
    """Upstream's layout of matrix operands in shared memory; `swizzle` 1, 2, 3 for rows of 32, 64, 128 bytes."""
    return _tma_utils.mma_shared_layout(dtype, swizzle, [int(extent) for extent in shape])


def swizzle_of(layout: Any) -> int:
    """The swizzle of a shared layout, as in `swizzled_layout`; 0 for none."""
    return int(_tma_utils.get_swizzle_mode_from_layout(layout).value)


def memory_layout(extents: Sequence[int], strides: Sequence[int]) -> Any:
    """Upstream's layout in linear memory."""
    return _upstream_layout.TileLayout(_upstream_layout.S[tuple(extents) : tuple(strides)])


def warpgroup_layout(extents: Sequence[int], strides: Sequence[tuple[int, bool]]) -> Any:
    """Upstream's layout over the threads of a warpgroup and their registers; a stride is (step, is it of threads)."""
    thread = _upstream_layout.Axis.tid_in_wg
    steps = tuple(step @ thread if threads else step for step, threads in strides)
    return _upstream_layout.TileLayout(_upstream_layout.S[tuple(extents) : steps])


def builder() -> Any:
    """A context in which statements are collected; its ``get()`` is the function made."""
    return _ir_builder.IRBuilder()


def function_frame() -> Any:
    """The frame of a TIRx function inside `builder`."""
    return _tirx_builder.prim_func()


def device_call(name: str, *arguments: tirx.Expr, code: str) -> tirx.Expr:
    """A call of a CUDA device function without a result; `code` defines it, once in a module."""
    return _cuda_op.cuda_func_call(name, *arguments, source_code=code)


def fast_exp2(value: tirx.Expr) -> tirx.Expr:
    """2**value of a float32 on a GPU as its one instruction, which flushes denormals; upstream's exp2 takes four."""
    code = (
        "__device__ __forceinline__ float axe_exp2(float x) {\n"
        '  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;\n}\n'
    )
    return _cuda_op.cuda_func_call("axe_exp2", value, source_code=code, return_type="float32")


# ---- Messages ----------------------------------------------------------------------------------------------------


def is_unsaid(error: BaseException) -> bool:
    """Whether the error is a parser's, of which upstream's hook for uncaught exceptions prints no word."""
    return isinstance(error, DiagnosticError) and not tvm._should_print_backtrace()
