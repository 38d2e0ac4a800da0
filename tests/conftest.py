"""What all the tests share: how they are spread over processes, repeatable property tests, goldens, the GPU, small
programs with references, and their judge.
"""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import tvm
from hypothesis import settings
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.collective.cuda import driver
from tvm_axe.layout import Mesh

# Tests change how things are compiled, and count what is; what an earlier run has kept would hide that. Those in
# executable/test_kept.py turn it on.
os.environ.setdefault("TVM_AXE_KEEP", "0")

# ---- Several processes: `pytest -n auto` ---------------------------------------------------------------------------

ALONE = (
    "collective/test_faults.py",
    "collective/test_hosts.py",
    "collective/test_limits.py",
    "collective/test_mpi.py",
    "collective/test_stress.py",
    "collective/test_workers.py",
    "meta/fleet/test_candidates.py",
    "meta/fleet/test_jobs.py",
    "meta/fleet/test_mesh.py",
    "meta/measure/test_child.py",
    "meta/measure/test_guarded.py",
    "meta/measure/test_measure_cuda.py",
    "meta/measure/test_runner.py",
    "meta/search/test_finals.py",
    "meta/search/test_loop.py",
    "meta/test_fleet_page.py",
    "meta/test_tuner.py",
    "records/test_database_writers.py",
    "test_demo.py",
    "tile/targets/cuda/specialized/test_on_gpu.py",
    "tile/targets/cuda/uniform/test_on_gpu.py",
)
"""The files of which no two run at once: they start many processes or MPI jobs, kill and interrupt them and look what
is left, time kernels, or need the GPU."""

LONG = (
    "relax/test_sharing.py",
    "relax/test_imports.py",
    "programs/test_programs.py",
    "tile/kernels/test_programs.py",
    "tile/kernels/test_on_cuda.py",
    "tile/targets/llvm/test_gemm.py",
    "tile/targets/llvm/test_lower.py",
    "meta/mesh/test_exhaustive.py",
    "relax/test_symbolic.py",
    "meta/mesh/test_job.py",
    "relax/test_pipeline.py",
)
"""The files that take longest, which start first."""


def _place(nodeid: str) -> str:
    """What a test is handed out with: the others of its file, or of the files that go alone."""
    file = nodeid.split("::")[0].removeprefix("tests/")
    return "alone" if file in ALONE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many processes as there are cores to run on."""
    return len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """A file's tests share their fixtures in one process; the files that go alone follow each other in one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlace(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _place(nodeid)

    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return ByPlace(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with what takes longest, so that no process is left with it at the end."""
    if hasattr(config, "workerinput"):
        first = ["alone", *LONG]
        items.sort(key=lambda item: first.index(place) if (place := _place(item.nodeid)) in first else len(first))


# ---- Work -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def python_calls() -> Callable[[Callable[[], object]], int]:
    """How many calls in Python a function leads to: how much there is to do, whatever else the machine does."""

    def count(function: Callable[[], object]) -> int:
        made, before = 0, sys.getprofile()

        def on_event(_frame: FrameType, event: str, _arg: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(on_event)
        try:
            function()
        finally:
            sys.setprofile(before)
        return made

    return count


# ---- Goldens: `pytest --refresh-goldens` ---------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag that refreshes goldens."""
    parser.addoption(
        "--refresh-goldens",
        action="store_true",
        help="write the files that tests compare with (docs/tours/pictures/) anew, and list those that changed",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, dict[str, str]], None]:
    """Assert that the files of a folder are these texts, by name; ``--refresh-goldens`` makes them so."""

    def check(folder: Path, texts: dict[str, str]) -> None:
        kinds = {Path(name).suffix for name in texts}
        files = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.*") if path.suffix in kinds}
        changed = sorted(name for name in {*files, *texts} if files.get(name) != texts.get(name))
        if not request.config.getoption("--refresh-goldens"):
            where = f"{folder}: {', '.join(changed)}"
            assert not changed, f"{where}: not as made now; look at what pytest --refresh-goldens makes of them"
        for name in changed:
            if name in texts:
                (folder / name).write_text(texts[name], encoding="utf-8")
            else:
                (folder / name).unlink()
            request.node.user_properties.append(("golden", str(folder / name)))

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the goldens that were refreshed."""
    if config.getoption("--refresh-goldens"):
        reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
        changed = {path for report in reports for name, path in report.user_properties if name == "golden"}
        terminalreporter.section("goldens")
        terminalreporter.line("\n".join(sorted(changed)) if changed else "none changed")


def pytest_configure(config: pytest.Config) -> None:
    """Have Ctrl-C's signal heard, which a job in the background starts without: tests send it to what they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- TVMScript -----------------------------------------------------------------------------------------------------


def _module_of(object: object, filename: str | None = None) -> ModuleType | None:
    """As `inspect.getmodule`, which looks through all modules for a frame that is of no file, each time anew.

    Reading TVMScript asks for every frame of the stack, and most modules are torch's and upstream's: that took a sixth
    of the tests' time. What the answer is doesn't change: no module's file is called ``<ast>`` or ``<string>``.
    """
    if isinstance(object, FrameType | CodeType):
        name = (object.f_code if isinstance(object, FrameType) else object).co_filename
        if name.startswith("<") and name.endswith(">"):
            return None
    return _getmodule(object, filename)


_getmodule, inspect.getmodule = inspect.getmodule, _module_of

# ---- Properties and machines ---------------------------------------------------------------------------------------

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture
def pairs_at_any_size(monkeypatch):
    """Products that fill no GPU become one kernel with their collective, too."""
    monkeypatch.setattr("tvm_axe.lower.pairs.WAVES", 0)


@pytest.fixture(scope="session")
def cuda():
    """The first CUDA GPU; the test is skipped where there is none."""
    device = tvm.cuda(0)
    if not device.exist:
        pytest.skip("no CUDA GPU on this machine")
    return device


@pytest.fixture(scope="session")
def on_gpus(cuda: tvm.runtime.Device) -> Callable[..., dict[str, object]]:
    """What places so many devices on GPUs, for `launch`: on one each or, where there are fewer, on those again.

    `barriers` is for devices that share one, which wait while others could run; those that don't always meet.
    """

    def options(devices: int, barriers: str | None = None) -> dict[str, object]:
        gpus = driver.gpus_for(devices)
        return {"gpus": gpus, "barriers": barriers if len(set(gpus)) < devices else None}

    return options


@pytest.fixture(scope="session")
def limit() -> Callable[[float], AbstractContextManager[None]]:
    """End a block that hangs: ``with limit(10):`` raises TimeoutError in it after ten seconds.

    No test compares times that it measured, as they are the machine's, too.
    """
    from limiting import limited  # not found where this file is another folder's plugin

    return limited


# ---- Small programs, one for each way to communicate -------------------------------------------------------------


class Program(NamedTuple):
    """A function over whole tensors, and what numpy makes of its inputs."""

    func: tirx.PrimFunc
    reference: Callable[..., tuple[np.ndarray, ...]]


class Programs:
    """The programs by their extents."""

    @staticmethod
    def block(m: int, n: int, depth: int, dtype: str = "float32") -> Program:
        """out = relu(A W + bias) + residual."""
        zero = tirx.const(0, dtype)

        @T.prim_func(s_tir=True)
        def func(
            A: T.Buffer((m, depth), dtype),
            W: T.Buffer((depth, n), dtype),
            bias: T.Buffer((n,), dtype),
            residual: T.Buffer((m, n), dtype),
            out: T.Buffer((m, n), dtype),
        ):
            C = T.sblock_alloc_buffer((m, n), dtype)
            for i, j, k in T.grid(m, n, depth):
                with T.sblock("mm"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        C[vi, vj] = zero
                    C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
            for i, j in T.grid(m, n):
                with T.sblock("epi"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    out[vi, vj] = T.max(C[vi, vj] + bias[vj], zero) + residual[vi, vj]

        return Program(func, lambda A, W, bias, residual: (np.maximum(A @ W + bias, 0) + residual,))

    @staticmethod
    def chain(m: int, n: int, depth: int) -> Program:
        """Consumers that read each other: `first` is a result and read on, D is read on and backwards by `flip`."""

        @T.prim_func(s_tir=True)
        def func(
            A: T.Buffer((m, depth), "float32"),
            W: T.Buffer((depth, n), "float32"),
            first: T.Buffer((m, n), "float32"),
            second: T.Buffer((m, n), "float32"),
            third: T.Buffer((m, n), "float32"),
        ):
            C = T.sblock_alloc_buffer((m, n))
            D = T.sblock_alloc_buffer((m, n))
            for i, j, k in T.grid(m, n, depth):
                with T.sblock("mm"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
            for i, j in T.grid(m, n):
                with T.sblock("double"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    D[vi, vj] = C[vi, vj] * T.float32(2)
            for i, j in T.grid(m, n):
                with T.sblock("first"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    first[vi, vj] = T.max(D[vi, vj], T.float32(0)) + C[vi, vj]
            for i, j in T.grid(m, n):
                with T.sblock("second"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    second[vi, vj] = first[vi, vj] * C[vi, vj]
            for i, j in T.grid(m, n):
                with T.sblock("flip"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    third[vi, vj] = D[m - 1 - vi, n - 1 - vj] + first[vi, vj]

        def reference(A, W):
            c = A @ W
            first = np.maximum(2 * c, 0) + c
            return first, first * c, 2 * c[::-1, ::-1] + first

        return Program(func, reference)

    @staticmethod
    def norm(m: int, n: int, depth: int) -> Program:
        """out = A W over the norm of its rows, which `squares` sums."""

        @T.prim_func(s_tir=True)
        def func(
            A: T.Buffer((m, depth), "float32"), W: T.Buffer((depth, n), "float32"), out: T.Buffer((m, n), "float32")
        ):
            C = T.sblock_alloc_buffer((m, n))
            S = T.sblock_alloc_buffer((m,))
            for i, j, k in T.grid(m, n, depth):
                with T.sblock("mm"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        C[vi, vj] = T.float32(0)
                    C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
            for i, j in T.grid(m, n):
                with T.sblock("squares"):
                    vi, vj = T.axis.remap("SR", [i, j])
                    with T.init():
                        S[vi] = T.float32(0)
                    S[vi] = S[vi] + C[vi, vj] * C[vi, vj]
            for i, j in T.grid(m, n):
                with T.sblock("scale"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    out[vi, vj] = C[vi, vj] / T.sqrt(S[vi])

        def reference(A, W):
            c = A @ W
            return (c / np.sqrt((c * c).sum(axis=1, keepdims=True)),)

        return Program(func, reference)

    @staticmethod
    def update(devices: int, m: int, n: int, dtype: str = "float32") -> Program:
        """The devices' gradients g are summed; `m_out` is a state that `p` goes on with."""

        @T.prim_func(s_tir=True)
        def func(
            g: T.Buffer((devices, m, n), dtype),
            old: T.Buffer((m, n), "float32"),
            w: T.Buffer((m, n), "float32"),
            m_out: T.Buffer((m, n), "float32"),
            w_out: T.Buffer((m, n), "float32"),
        ):
            s = T.sblock_alloc_buffer((m, n))
            for i, j, k in T.grid(m, n, devices):
                with T.sblock("sum"):
                    vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                    with T.init():
                        s[vi, vj] = T.float32(0)
                    s[vi, vj] = s[vi, vj] + g[vk, vi, vj].astype("float32")
            for i, j in T.grid(m, n):
                with T.sblock("state"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    m_out[vi, vj] = old[vi, vj] * T.float32(0.5) + s[vi, vj]
            for i, j in T.grid(m, n):
                with T.sblock("step"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    w_out[vi, vj] = w[vi, vj] - m_out[vi, vj]

        def reference(g, old, w):
            state = 0.5 * old + g.sum(axis=0)
            return state, w - state

        return Program(func, reference)

    @staticmethod
    def pipeline(stages: int, m: int, shift: int = 1) -> Program:
        """Each of the stages doubles what it has, sends it `shift` stages on, and adds what it was given."""

        @T.prim_func(s_tir=True)
        def func(X: T.Buffer((stages, m), "float32"), out: T.Buffer((stages, m), "float32")):
            C = T.sblock_alloc_buffer((stages, m))
            Z = T.sblock_alloc_buffer((stages, m))
            for s, i in T.grid(stages, m):
                with T.sblock("double"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    C[vs, vi] = X[vs, vi] * T.float32(2)
            for s, i in T.grid(stages, m):
                with T.sblock("send"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    Z[vs, vi] = C[(vs - shift) % stages, vi]
            for s, i in T.grid(stages, m):
                with T.sblock("add"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    out[vs, vi] = Z[vs, vi] + X[vs, vi]

        return Program(func, lambda X: (np.roll(2 * X, shift, axis=0) + X,))

    @staticmethod
    def experts(sources: int, count: int, tokens: int, width: int) -> Program:
        """What each source dispatches to each expert is multiplied by the expert's matrix and combined."""

        @T.prim_func(s_tir=True)
        def func(
            X: T.Buffer((sources, count, tokens), "float32"),
            W: T.Buffer((count, tokens, width), "float32"),
            Y: T.Buffer((sources, count, width), "float32"),
        ):
            D = T.sblock_alloc_buffer((sources, count, tokens))
            H = T.sblock_alloc_buffer((sources, count, width))
            for s, e, t in T.grid(sources, count, tokens):
                with T.sblock("dispatch"):
                    vs, ve, vt = T.axis.remap("SSS", [s, e, t])
                    D[vs, ve, vt] = X[vs, ve, vt] * T.float32(2)
            for s, e, h, t in T.grid(sources, count, width, tokens):
                with T.sblock("mm"):
                    vs, ve, vh, vt = T.axis.remap("SSSR", [s, e, h, t])
                    with T.init():
                        H[vs, ve, vh] = T.float32(0)
                    H[vs, ve, vh] = H[vs, ve, vh] + D[vs, ve, vt] * W[ve, vt, vh]
            for s, e, h in T.grid(sources, count, width):
                with T.sblock("combine"):
                    vs, ve, vh = T.axis.remap("SSS", [s, e, h])
                    Y[vs, ve, vh] = H[vs, ve, vh] + T.float32(1)

        return Program(func, lambda X, W: (2 * np.einsum("set,eth->seh", X, W) + 1,))


@pytest.fixture(scope="session")
def programs() -> type[Programs]:
    """Small programs, each with what numpy makes of its inputs."""
    return Programs


# ---- How they are run and judged ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched() -> Iterator[Callable[..., Workers]]:
    """Workers on a mesh, launched at the first use and shared by the module's tests."""
    started: dict[tuple[str, str], Workers] = {}

    def get(mesh: Mesh, engine: str = "threads") -> Workers:
        key = (repr(mesh), engine)
        if key not in started:
            started[key] = axe.launch(mesh, engine=engine)
        return started[key]

    yield get
    for workers in started.values():
        workers.close()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., axe.Executable]:
    """axe.compile without the tuning results that a checkout may hold."""
    untuned = tmp_path_factory.mktemp("untuned")
    return lambda program, **options: axe.compile(program, work_dir=untuned, **options)


@pytest.fixture(scope="session")
def moved() -> Callable[..., int]:
    """The bytes of stages of a program on `tp` devices, over a tensor of so many rows, which they share, and so wide.

    A stage is "AR", an all-reduce; "RS", a reduce-scatter; "AG", an all-gather; or several in one kernel, as "RS+AG".
    """

    def of(stages: list[str], rows: int, width: int, tp: int, itemsize: int = 4) -> int:
        def blocks(extent: int) -> list[int]:
            size = -(-extent // tp)
            return [min(size, max(0, extent - rank * size)) for rank in range(tp)]

        size, shares = rows * width, [own * width for own in blocks(rows)]
        lines = np.cumsum([0, *blocks(-(-size // 64))]) * 64  # an all-reduce's parts
        parts = np.diff(lines.clip(max=size))
        received = {
            "RS": np.array([(tp - 1) * own for own in shares]),
            "AG": np.array([size - own for own in shares]),
            "AR": np.array([(tp - 1) * own + size - own for own in parts]),
        }
        return itemsize * sum(int(sum(received[part] for part in stage.split("+")).max()) for stage in stages)

    return of


def relative_error(outputs, expected) -> float:
    """The largest relative error of any output; NaN if there is a NaN."""
    return max(float(np.abs(o - e).max() / np.abs(e).max()) for o, e in zip(outputs, expected, strict=True))


def ignoring_annotations(func: tirx.PrimFunc, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All the parameters after a run of the function as it is, on one device."""
    arrays = {
        param.name: inputs[param.name].copy()
        if param.name in inputs
        else np.full([int(extent) for extent in param.shape], np.nan, str(param.dtype))
        for param in func.params
    }
    tensors = {name: tvm.runtime.tensor(array) for name, array in arrays.items()}
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    tvm.compile(module, target="llvm")["main"](*tensors.values())
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def fresh(func: tirx.PrimFunc, names: tuple[str, ...], rng: np.random.Generator) -> list[np.ndarray]:
    """New data for the parameters `names`."""
    params = {param.name: param for param in func.params}
    shapes = [[int(extent) for extent in params[name].shape] for name in names]
    return [rng.standard_normal(shape).astype(str(params[name].dtype)) for name, shape in zip(names, shapes)]


@pytest.fixture(scope="session")
def alone() -> Callable[..., None]:
    """Assert that a scheduled function, its annotations ignored, gives on one device what numpy has in float64."""

    def check(func: tirx.PrimFunc, reference: Callable, bound: float = 1e-5) -> None:
        count = reference.__code__.co_argcount
        names = tuple(param.name for param in func.params)
        inputs = fresh(func, names[:count], np.random.default_rng(len(func.script())))
        outputs = ignoring_annotations(func, dict(zip(names, inputs)))
        expected = reference(*(array.astype("float64") for array in inputs))
        assert relative_error([outputs[name] for name in names[count:]], expected) < bound

    return check


@pytest.fixture(scope="module")
def judge(launched: Callable[..., Workers]) -> Callable[..., None]:
    """Assert that an executable gives what numpy has in float64, twice, after NaNs; and one device that ignores all.

    A value left over in a slab, or in the padding of an uneven one, is a NaN then and shows.
    """

    def check(
        exe: axe.Executable,
        func: tirx.PrimFunc,
        reference: Callable,
        bound: float = 1e-5,
        engine: str = "threads",
    ) -> None:
        workers, rng = launched(exe.mesh, engine), np.random.default_rng(len(func.script()))
        inputs = fresh(func, exe.inputs, rng)
        exe.run(workers, *(np.full_like(array, np.nan) for array in inputs))
        for _ in range(2):
            inputs = fresh(func, exe.inputs, rng)
            outputs = exe.run(workers, *inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            expected = reference(*(array.astype("float64") for array in inputs))
            assert relative_error(outputs, expected) < bound
        apart = ignoring_annotations(func, dict(zip(exe.inputs, inputs)))
        assert relative_error([apart[name] for name in exe.outputs], expected) < bound

    return check
