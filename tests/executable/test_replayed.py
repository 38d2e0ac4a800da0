"""Calls that are replayed: told, captured, then launched, on buffers that stay. On a CPU a stand-in replays."""

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_axe as axe
from tvm_axe._tvm import as_array
from tvm_axe.errors import LowerError
from tvm_axe.executable.placed import DeviceMemory
from tvm_axe.executable.replayed import ROOM, Replays, why_told
from tvm_axe.executable.session import Session


class Recorded:
    """What a GPU's graphs do, by what they promise: a captured call is done again at the same addresses.

    Nothing of the model runs any more but what was captured: the function with its fixed inputs, whose results land
    where they were when it was captured.
    """

    def __init__(self, room=ROOM, can=True):
        self.room, self.can, self.log, self.graphs, self.closed = room, can, [], {}, False

    def __contains__(self, key):
        return key in self.graphs

    def run(self, key, tell):
        graph = self.graphs.pop(key, None)
        if graph is None:
            self.log.append("told")
            tell()
            graph = "told"
        elif graph == "told" and self.can:
            self.log.append("captured")
            graph = self.captured(tell)
            graph()
        elif callable(graph):
            self.log.append("replayed")
            graph()
        else:
            self.log.append("never")
            tell()
            graph = "never"
        self.graphs[key] = graph
        while len(self.graphs) > self.room:
            del self.graphs[next(iter(self.graphs))]
        return callable(graph)

    def captured(self, tell):
        tell()
        call = tell.__closure__[[*tell.__code__.co_freevars].index("call")].cell_contents
        run = tell.__closure__[[*tell.__code__.co_freevars].index("run")].cell_contents
        inputs, results, held = call.inputs, call.results, [*call.held]
        poison(results, inputs)

        def replay():
            assert held and all(any(one is other for other in call.held) for one in held)
            for fixed, fresh in zip(listed(results), listed(run(inputs))):
                fresh.copyto(fixed)

        return replay

    def close(self):
        self.closed = True


def listed(results):
    return [results] if isinstance(results, tvm.runtime.Tensor) else [one for each in results for one in listed(each)]


def poison(results, inputs):
    """A capture computes nothing; what is an input is there."""
    there = {as_array(each).ctypes.data for each in inputs}
    for each in listed(results):
        if as_array(each).ctypes.data not in there:
            each.copyfrom(np.full(tuple(each.shape), np.nan, str(each.dtype)))


def model(branch=False, library=False, passes=False):
    """Functions of x and w: relu(x w), with x itself if it `passes` it on; of any number of rows."""
    builder, n = relax.BlockBuilder(), tvm.tirx.Var("n", "int64")
    x, w = relax.Var("x", relax.TensorType((n, 8), "float32")), relax.Var("w", relax.TensorType((8, 8), "float32"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        y = builder.emit(relax.op.nn.relu(relax.op.matmul(x, w)))
        if library:
            y = builder.emit(relax.call_dps_packed("tests.nothing", [y], relax.TensorType((n, 8), "float32")))
        builder.emit_func_output([y, x] if passes else y)
    return builder.get()


def session(mod, weights, graphs):
    exe = axe.compile(mod, work_dir=None)
    memory = DeviceMemory(exe.vm, exe.functions, {}, tvm.cpu(), ["main"], graphs)
    return Session(exe.name, exe.functions, weights, memory)


def drawn(seed, rows=4):
    return np.random.default_rng(seed).standard_normal((rows, 8)).astype("float32")


def test_calls_are_told_captured_and_replayed():
    w, graphs = drawn(0, 8), Recorded()
    with session(model(), {"w": w}, graphs) as own:
        kept = []
        for seed in range(1, 7):
            x = drawn(seed)
            kept.append((own.main(x), np.maximum(x.astype("float64") @ w, 0)))
        for handle, want in kept:  # a result is the call's own, whatever is called after it
            np.testing.assert_allclose(np.asarray(handle), want, rtol=1e-5, atol=1e-5)
    assert graphs.log == ["told", "captured"] + ["replayed"] * 4
    assert graphs.closed


def test_other_shapes_are_another_graph_and_their_number_is_limited():
    w, graphs = drawn(0, 8), Recorded(room=2)
    with session(model(), {"w": w}, graphs) as own:
        for turn in range(3):
            for rows in (1, 3, 5):
                x = drawn(10 * turn + rows, rows)
                want = np.maximum(x.astype("float64") @ w, 0)
                np.testing.assert_allclose(np.asarray(own.main(x)), want, rtol=1e-5, atol=1e-5)
                assert len(own._memory._replays._calls) <= 2
        assert graphs.log == ["told"] * 9  # each has gone before it comes again
        for seed in range(4):
            own.main(drawn(seed, 5))
    assert graphs.log[9:] == ["captured", "replayed", "replayed", "replayed"]


def test_what_can_not_be_captured_is_told_each_time():
    w, graphs = drawn(0, 8), Recorded(can=False)
    with session(model(), {"w": w}, graphs) as own:
        for seed in range(1, 5):
            x = drawn(seed)
            want = np.maximum(x.astype("float64") @ w, 0)
            np.testing.assert_allclose(np.asarray(own.main(x)), want, rtol=1e-5, atol=1e-5)
    assert graphs.log == ["told", "never", "never", "never"]


def test_results_are_handed_on_and_an_input_that_is_returned_is_a_copy():
    w, graphs = drawn(0, 8), Recorded()
    with session(model(passes=True), {"w": w}, graphs) as own:
        x = drawn(1)
        want, given = x.astype("float64"), x
        before = []
        for _ in range(5):
            y, same = own.main(given)
            before.append((same, np.asarray(given).copy()))
            want, given = np.maximum(want @ w, 0), y
            np.testing.assert_allclose(np.asarray(y), want, rtol=1e-4, atol=1e-4)
        for same, was in before:
            np.testing.assert_array_equal(np.asarray(same), was)


def test_what_fails_is_told_anew():
    """An error of a call leaves nothing of it: the next begins from the start."""
    graphs = Recorded()
    machine_of = axe.compile(model(), work_dir=None).vm
    machine = relax.VirtualMachine(machine_of, tvm.cpu())
    replays = Replays(machine, tvm.cpu(), graphs, ["main"])
    x, w = (tvm.runtime.tensor(drawn(seed, rows)) for seed, rows in ((0, 4), (1, 8)))

    def run(inputs):
        return machine["main"](*inputs, w)

    def failing(_inputs):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replays.call("main", [x], failing)
    for _ in range(3):
        got = replays.call("main", [x], run).numpy()
        np.testing.assert_allclose(got, np.maximum(x.numpy() @ w.numpy(), 0), rtol=1e-5, atol=1e-5)
    assert graphs.log == ["told", "told", "captured", "replayed"]


def test_what_the_host_decides_is_named():
    exe = axe.compile(model(), target="cuda:sm_90a", work_dir=None)
    assert why_told(exe.runnable, "main") is None
    assert "it calls tests.nothing, which isn't compiled with it" in why_told(model(library=True), "main")
    builder = relax.BlockBuilder()
    c, x = relax.Var("c", relax.TensorType((), "bool")), relax.Var("x", relax.TensorType((4,), "float32"))
    function = relax.Function([c, x], relax.SeqExpr([], relax.If(c, x, relax.op.add(x, x))), x.ty)
    builder.add_func(function, "main")
    assert "it branches" in why_told(builder.get(), "main")


@pytest.mark.parametrize("mesh", [None, axe.Mesh({"tp": 2})])
def test_graphs_of_what_is_no_gpu_are_refused(mesh):
    exe = axe.compile(model(), mesh=mesh, work_dir=None)
    with pytest.raises(LowerError, match=r"graphs are .* leave graphs out"):
        exe.load({"w": drawn(0, 8)}, graphs=True)


@pytest.mark.gpu
def test_on_a_gpu(cuda):
    """Replayed calls are right, of two shapes in turns, and results stay as they were."""
    w = drawn(0, 8)
    exe = axe.compile(model(passes=True), target="cuda", work_dir=None)
    with exe.load({"w": w}, graphs=True) as own, exe.load({"w": w}) as plain:
        kept = []
        for seed in range(12):
            x = drawn(seed, 4 if seed % 2 else 16)
            y, same = own.main(x)
            want = np.maximum(x.astype("float64") @ w, 0)
            kept.append((y, same, x, want))
            plain.main(x)  # what others allocate between is theirs
        for y, same, x, want in kept:
            np.testing.assert_allclose(np.asarray(y), want, rtol=2e-3, atol=2e-3)
            np.testing.assert_array_equal(np.asarray(same), x)
        assert all(callable(getattr(graph, "getPtr", None)) for graph in own._memory._replays._graphs._graphs.values())
