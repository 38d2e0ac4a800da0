"""Sessions of models on meshes: right, weights placed in shares and never again, state on the devices, faults named."""

from __future__ import annotations

import gc
import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

import tvm_axe as axe
from tvm_axe.collective.start import ranks_command
from tvm_axe.executable import Session, read_safetensors, write_safetensors
from tvm_axe.executable.spread import Pool

WIDTH, HEADS, SIZE, HIDDEN, WORDS, ROOM, PROMPT = 32, 4, 8, 64, 48, 8, 5
MESH = axe.Mesh({"tp": 2})


class Layer(nn.Module):
    """Attention over a cache of a constant length, and a product pair."""

    def __init__(self) -> None:
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def heads(self, x: Any, n: int) -> list[Any]:
        return [op.reshape(t(x), (1, n, HEADS, SIZE)) for t in (self.q, self.k, self.v)]

    def attended(self, x: Any, q: Any, k: Any, v: Any, mask: Any, n: int) -> Any:
        q, k, v = (op.permute_dims(t, (0, 2, 1, 3)) for t in (q, k, v))
        scores = op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))) * SIZE**-0.5 + mask
        y = op.reshape(op.permute_dims(op.matmul(op.softmax(scores, -1), v), (0, 2, 1, 3)), (1, n, WIDTH))
        x = x + self.out(y)
        return x + self.down(op.relu(self.up(x)))


class Decoder(nn.Module):
    """A prompt, and a token behind others, whose place in the cache is a one among zeros."""

    def __init__(self) -> None:
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layer = Layer()

    def prefill(self, ids: Any, mask: Any) -> Any:
        x = self.embedding(ids)
        q, k, v = self.layer.heads(x, PROMPT)
        x = self.layer.attended(x, q, k, v, mask, PROMPT)
        k, v = (op.pad(t, [0, 0, 0, ROOM - PROMPT, 0, 0, 0, 0]) for t in (k, v))
        return self.head(x), (k, v)

    def decode(self, ids: Any, at: Any, mask: Any, k: Any, v: Any) -> Any:
        x = self.embedding(ids)
        q, own_k, own_v = self.layer.heads(x, 1)
        k, v = k + own_k * at, v + own_v * at
        return self.head(self.layer.attended(x, q, k, v, mask, 1)), (k, v)


def export() -> tvm.IRModule:
    def spec(*shape: int, dtype: str = "float32") -> nn.spec.Tensor:
        return nn.spec.Tensor(list(shape), dtype)

    cache = spec(1, ROOM, HEADS, SIZE)
    prompt = {"ids": spec(1, PROMPT, dtype="int32"), "mask": spec(1, 1, PROMPT, PROMPT)}
    token = {"ids": spec(1, 1, dtype="int32"), "at": spec(1, ROOM, 1, 1), "mask": spec(1, 1, 1, ROOM)}
    return Decoder().export_tvm({"prefill": prompt, "decode": {**token, "k": cache, "v": cache}})[0]


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {name: tuple(map(int, param.shape)) for name, param in Decoder().named_parameters()}
    return {n: (rng.standard_normal(s) / s[-1] ** 0.5).astype("float32") for n, s in shapes.items()}


def causal(n: int) -> np.ndarray:
    return np.triu(np.full((1, 1, n, n), -1e9, "float32"), 1)


def token(at: int, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    place = (np.arange(ROOM) == at).astype("float32").reshape(1, ROOM, 1, 1)
    hidden = np.where(np.arange(ROOM) > at, np.float32(-1e9), np.float32(0)).reshape(1, 1, 1, ROOM)
    return ids[:, at : at + 1], place, hidden


def in_numpy(w: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits of all tokens in float64."""
    w, n = {name: array.astype("float64") for name, array in w.items()}, ids.shape[1]
    x = w["embedding.weight"][ids[0]]
    q, k, v = ((x @ w[f"layer.{t}.weight"].T).reshape(n, HEADS, SIZE) for t in "qkv")
    scores = np.exp(np.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5 + causal(n)[0, 0])
    y = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(n, WIDTH)
    x = x + y @ w["layer.out.weight"].T
    x = x + np.maximum(x @ w["layer.up.weight"].T + w["layer.up.bias"], 0) @ w["layer.down.weight"].T
    return (x + w["layer.down.bias"]) @ w["head.weight"].T


def used(workers: axe.Workers) -> dict[int, int]:
    """What there is in the workers' memory, by offset."""
    gc.collect()
    workers.free_discarded()
    return workers._session.arena._used.copy()


class Scale(nn.Module):
    """The smallest model: one product."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((64, 16), "float32")

    def forward(self, x: Any) -> Any:
        return op.matmul(x, self.weight), x


X, W = (np.random.default_rng(1).standard_normal(shape, dtype="float32") for shape in ((4, 64), (64, 16)))


@pytest.fixture(scope="module")
def small() -> axe.Executable:
    mod, _ = Scale().export_tvm({"forward": {"x": nn.spec.Tensor([4, 64], "float32")}})
    return axe.compile(mod, mesh=MESH, work_dir=None)


IDS = np.random.default_rng(3).integers(0, WORDS, (1, ROOM), dtype="int32")


def generated(model: Session) -> np.ndarray:
    """Logits of a prompt, and of the tokens behind it."""
    logits, caches = model.prefill(IDS[:, :PROMPT], causal(PROMPT))
    rows = [np.asarray(logits)[0]]
    for at in range(PROMPT, ROOM):
        logits, caches = model.decode(*token(at, IDS), *caches)
        rows.append(logits.numpy()[0])
    return np.concatenate(rows)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.fixture(scope="module")
def exe() -> axe.Executable:
    return axe.compile(export(), mesh=MESH, work_dir=None)


@pytest.fixture(scope="module", params=["threads", "processes"])
def workers(request: pytest.FixtureRequest) -> Iterator[axe.Workers]:
    with axe.launch(MESH, engine=request.param) as launched:
        yield launched


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_safetensors(path, weights())
    return path


@pytest.fixture
def model(exe: axe.Executable, workers: axe.Workers, file: Path) -> Iterator[Session]:
    with exe.load(workers, file) as session:
        yield session


# ---- Right, and nothing is copied again ------------------------------------------------------------------------------


def test_state_stays_on_the_devices(model: Session) -> None:
    assert error(generated(model), in_numpy(weights(), IDS)) < 1e-5
    _, (k, v) = model.prefill(IDS[:, :PROMPT], causal(PROMPT))
    assert (k.shape, k.dtype) == ((1, ROOM, HEADS, SIZE), "float32")
    before = model.copied
    _, (k, _) = model.decode(*token(PROMPT, IDS), k, v=v)
    brought = sum(array.nbytes for array in token(PROMPT, IDS))
    assert model.copied - before == brought  # each once, as each device needs all; no weight, and no cache
    np.testing.assert_array_equal(np.from_dlpack(k), k.numpy())


def test_a_handle_is_what_it_was(model: Session) -> None:
    """Results of later calls don't lie where a handle's array does, and those that nobody has are used again."""
    logits, caches = model.prefill(IDS[:, :PROMPT], causal(PROMPT))
    first, kept = logits.numpy(), caches[0].numpy()
    for _ in range(3):
        model.decode(*token(PROMPT, IDS), *caches)
        model.prefill(IDS[:, 1 : PROMPT + 1], causal(PROMPT))
    np.testing.assert_array_equal(logits, first)
    np.testing.assert_array_equal(caches[0], kept)
    made = len(model._memory._pool._all)
    for _ in range(5):
        model.decode(*token(PROMPT, IDS), *caches)
    assert len(model._memory._pool._all) == made


def test_devices_hold_their_shares(exe: axe.Executable, workers: axe.Workers, file: Path) -> None:
    """Of what functions share nothing is there twice; what all hold whole is stored once."""
    total = sum(array.nbytes for array in weights().values())
    before = used(workers)
    with exe.load(workers, file) as model:
        assert max(model.held) <= total * (1 / 2 + 0.05)
        taken = sum(workers._session.arena._used.values()) - sum(before.values())
        tensors = [value.tensor for value in model._memory._fixed.values()]
        assert model.copied == sum(each.nbytes * (1 if each.shared else 2) for each in tensors) <= total * 1.1
        assert taken <= total * 1.1 + 4096 * 2 * len(model._memory._pool._all)
    assert used(workers) == before


@pytest.mark.parametrize("kind", ["dict", "list", "torch", "memmap"])
def test_where_weights_come_from(exe: axe.Executable, workers: axe.Workers, kind: str, tmp_path: Path) -> None:
    params: Any = weights()
    if kind == "list":
        params = list(params.values())
    elif kind == "torch":
        torch = pytest.importorskip("torch")
        params = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in params.items()}
    elif kind == "memmap":
        for name, array in params.items():
            np.save(tmp_path / f"{name}.npy", array)
        params = {name: np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in params}
    with exe.load(workers, params) as model:
        assert error(generated(model), in_numpy(weights(), IDS)) < 1e-5


def test_two_sessions_of_one_executable(exe: axe.Executable, workers: axe.Workers) -> None:
    other = {name: array * np.float32(0.5) for name, array in weights().items()}
    with exe.load(workers, weights()) as one, exe.load(workers, other) as two:
        _, caches = one.prefill(IDS[:, :PROMPT], causal(PROMPT))
        assert error(generated(two), in_numpy(other, IDS)) < 1e-5
        assert error(generated(one), in_numpy(weights(), IDS)) < 1e-5
        before = two.copied
        with pytest.raises(axe.InputError, match=r"k is <float32\[1, 8, 4, 8\] in a session of model>, another"):
            two.decode(*token(PROMPT, IDS), *caches)
        assert two.copied == before
        two.close()
        assert error(generated(one), in_numpy(weights(), IDS)) < 1e-5


def test_a_session_that_is_forgotten(small: axe.Executable, workers: axe.Workers) -> None:
    before = used(workers)
    model = small.load(workers, {"weight": W})
    product, same = model.forward(X)
    calls = len(workers._calls)
    del model
    np.testing.assert_allclose(product, X @ W, rtol=1e-4)  # a handle keeps its session
    del product, same
    assert used(workers) == before and len(workers._calls) == calls - 1


def test_own_workers() -> None:
    """A session has workers without being given any, and keeps the executable that launched them."""
    mod, _ = Scale().export_tvm({"forward": {"x": nn.spec.Tensor([4, 64], "float32")}})
    model = axe.compile(mod, mesh=MESH, work_dir=None).load({"weight": W})
    gc.collect()
    assert error(model.forward(X)[0].numpy(), X.astype("float64") @ W) < 1e-5


def test_time_and_trace(model: Session) -> None:
    _, caches = model.prefill(IDS[:, :PROMPT], causal(PROMPT))
    assert min(model.decode.time(*token(PROMPT, IDS), *caches, repeat=3)) > 0
    timeline = model.decode.trace(*token(PROMPT, IDS), *caches)
    kinds = {event.kind for event in timeline.events}
    assert "local" in kinds and {event.worker for event in timeline.events} == {0, 1}
    calls = [[event.name for event in timeline.track(n) if event.kind != "waiting"] for n in (0, 1)]
    assert calls[0] == calls[1]
    assert "decode(ids: int32[1, 1]" in model.show() and f"a device holds {model.held[0]}" in model.show()


def test_a_model_of_one_function_is_run_on_whole_arrays(small: axe.Executable, workers: axe.Workers) -> None:
    for x in (X, X + 1):
        product, same = small.run(workers, x, W)
        assert error(product, x.astype("float64") @ W) < 1e-5
        np.testing.assert_array_equal(same, x)
    assert min(small.time(workers, X, W, repeat=2)) > 0
    assert small.trace(workers, X, W).events


def test_an_input_that_is_returned(small: axe.Executable, workers: axe.Workers) -> None:
    with small.load(workers, {"weight": W}) as model:
        product, same = model.forward(X)
        again, other = model.forward(same)
        np.testing.assert_array_equal(product, again)
        del same, product
        model.forward(X + 1)
        np.testing.assert_array_equal(other, X)


# ---- Faults ----------------------------------------------------------------------------------------------------------


def test_what_is_wrong_is_what_it_is_on_one_device(model: Session) -> None:
    before = model.copied
    with pytest.raises(axe.InputError) as raised:
        model.prefill(IDS.astype("int64")[:, :PROMPT], causal(PROMPT)[0])
    for problem in (
        "ids is int32; got an array of int64",
        "mask has the shape (1, 1, 5, 5); got an array of (1, 5, 5)",
    ):
        assert problem in str(raised.value)
    with pytest.raises(axe.InputError, match="'mask' is missing"):
        model.prefill(IDS[:, :PROMPT])
    with pytest.raises(axe.LowerError, match="model has no function 'forward'"):
        model["forward"]
    assert model.copied == before


def test_wrong_weights_leave_nothing(exe: axe.Executable, workers: axe.Workers, tmp_path: Path) -> None:
    before = used(workers)
    wrong = weights()
    wrong["more"] = wrong.pop("layer.q.weight")
    wrong["head.weight"] = wrong["head.weight"].astype("float16")
    with pytest.raises(axe.InputError) as raised:
        exe.load(workers, wrong)
    for problem in ("layer.q.weight: float32[32, 32] is missing", "head.weight is float32; got an array of float16"):
        assert problem in str(raised.value)
    write_safetensors(tmp_path / "model.safetensors", weights())
    read = read_safetensors(tmp_path / "model.safetensors")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    with pytest.raises(axe.WorkerError, match=r"model\.safetensors: has been written to since it was mapped"):
        exe.load(workers, read)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(axe.WorkerError, match=r"model\.safetensors: cannot be read by a worker: No such file"):
        exe.load(workers, read)
    assert used(workers) == before
    with axe.launch(axe.Mesh({"tp": 3}), engine="threads") as three, pytest.raises(axe.LowerError, match="tp=2"):
        exe.load(three, weights())


def test_too_little_memory(exe: axe.Executable, workers: axe.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = workers._session.arena
    before, real, left = used(workers), arena.allocate, [9]

    def allocate(nbytes: int, take: bool = True) -> int:
        left[0] -= 1
        if not left[0]:
            raise axe.WorkerError(arena._no_space(nbytes, "no space left on device"))
        return real(nbytes, take)

    monkeypatch.setattr(arena, "allocate", allocate)
    with pytest.raises(axe.WorkerError, match=r"load: \S+ doesn't fit, of weights of \d+ bytes on each device: no sha"):
        exe.load(workers, weights())
    assert used(workers) == before
    with exe.load(workers, weights()) as model:
        assert error(generated(model), in_numpy(weights(), IDS)) < 1e-5


def test_workers_that_go(small: axe.Executable) -> None:
    with axe.launch(MESH) as launched:
        model = small.load(launched, {"weight": W})
        product, _ = model.forward(X)
        launched.close()
        for use in (product.numpy, lambda: model.forward(X), lambda: model.forward(X[:, ::-1])):
            with pytest.raises(axe.WorkerError, match=r"workers are closed; launch new ones, and load the model again"):
                use()
        model.close()
        with pytest.raises(axe.LowerError, match="the session of forward is closed"):
            product.numpy()
        with pytest.raises(axe.WorkerError, match="the workers are closed; launch new ones"):
            small.load(launched, {"weight": W})


@pytest.mark.parametrize("when", ["load", "call"])
def test_a_worker_that_dies(small: axe.Executable, when: str) -> None:
    with axe.launch(MESH) as launched:
        model = small.load(launched, {"weight": W})
        pid = launched._session._forked.pid(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(axe.WorkerError, match=rf"worker 1 .*pid {pid}"):
            small.load(launched, {"weight": W}) if when == "load" else model.forward(X)
        assert launched.closed
        with pytest.raises(axe.WorkerError, match="the workers are closed"):
            model.forward(X)
        model.close()


def test_forms_that_differ_are_converted(workers: axe.Workers) -> None:
    """What one function leaves otherwise than another takes it is brought there on the devices."""

    class Two(nn.Module):
        def first(self, x: Any) -> Any:
            return op.relu(x)

        def second(self, y: Any) -> Any:
            return op.add(y, y)

    spec = nn.spec.Tensor([6, 10], "float32")
    mod, _ = Two().export_tvm({"first": {"x": spec}, "second": {"y": spec}})
    x = np.random.default_rng(2).standard_normal((6, 10), dtype="float32")
    for pins in ({"x": 0, "y": 1}, {"x": 1, "y": None}, {"x": None, "y": 0}):
        exe = axe.compile(mod, mesh=MESH, work_dir=None, pins=pins)
        with exe.load(workers, {}) as model:
            got = model.second(model.first(x))
            np.testing.assert_array_equal(got, 2 * np.maximum(x, 0))
            assert model.copied in (x.nbytes, 2 * x.nbytes)


def test_results_that_are_no_tensors_are_refused() -> None:
    builder, x = tvm.relax.BlockBuilder(), tvm.relax.Var("x", tvm.relax.TensorType([4, 8], "float32"))
    with builder.function("main", [x]):
        y = builder.emit(tvm.relax.op.nn.relu(x))
        builder.emit_func_output(tvm.relax.Tuple([y, tvm.relax.ShapeExpr([4, 8])]))
    with pytest.raises(axe.LowerError, match=r"main: 1 of its 2 results \(.*\) are no tensors"):
        axe.compile(builder.get(), mesh=MESH, work_dir=None)


# ---- Files -----------------------------------------------------------------------------------------------------------


class Constants(nn.Module):
    """Constants beside weights."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(64, 32), nn.Linear(32, 64, bias=False)

    def forward(self, x: Any) -> Any:
        own = op.wrap_nested(tvm.relax.const(np.arange(64, dtype="float32")), "own")
        return op.add(self.down(op.relu(self.up(x))), own)


def test_what_is_saved_is_loaded(workers: axe.Workers, tmp_path: Path) -> None:
    mod, _ = Constants().export_tvm({"forward": {"x": nn.spec.Tensor([4, 64], "float32")}})
    exe = axe.compile(mod, mesh=MESH, work_dir=None)
    assert exe.shared.constants
    exe.save(tmp_path / "model.axe")
    again = axe.Executable.load(tmp_path / "model.axe")
    assert again.show().startswith("model on mesh tp=2\nforward: ") and again.bytes == exe.bytes
    assert again.show() == exe.show() and again.layouts == exe.layouts and again.functions == exe.functions
    rng = np.random.default_rng(4)
    up, bias, down = (rng.standard_normal(shape, dtype="float32") for shape in ((32, 64), (32,), (64, 32)))
    with again.load(workers, {"up.weight": up, "up.bias": bias, "down.weight": down}) as model:
        want = np.maximum(X.astype("float64") @ up.T + bias, 0) @ down.T + np.arange(64)
        assert error(model.forward(X).numpy(), want) < 1e-5


@pytest.mark.parametrize("constant", [True, False], ids=["constants", "parameters"])
def test_weights_are_packed_once_by_who_has_them(constant: bool, workers: axe.Workers, tmp_path: Path) -> None:
    mod, _ = Constants().export_tvm({"forward": {"x": nn.spec.Tensor([4, 64], "float32")}})
    rng = np.random.default_rng(5)
    weights = {
        name: rng.standard_normal(shape, dtype="float32")
        for name, shape in {"up.weight": (32, 64), "up.bias": (32,), "down.weight": (64, 32)}.items()
    }
    up, bias, down = weights.values()
    if constant:
        mod = tvm.relax.transform.BindParams("forward", {k: tvm.runtime.tensor(v) for k, v in weights.items()})(mod)
    exe = axe.compile(mod, mesh=MESH, work_dir=None, pack_weights=not constant)
    sources = {name for pack in exe.shared.packs for name in pack.sources}
    assert len(sources) == 2 and (constant or sources == {"up.weight", "down.weight"})
    exe.save(tmp_path / "model.axe")
    for each in (exe, axe.Executable.load(tmp_path / "model.axe")):
        with each.load(workers, {} if constant else weights) as model:
            kept = model._memory._fixed
            assert not sources & kept.keys() and kept.keys() > {made.name for p in exe.shared.packs for made in p.made}
            for _ in range(2):
                x = rng.standard_normal(X.shape, dtype="float32")
                want = np.maximum(x.astype("float64") @ up.T + bias, 0) @ down.T + np.arange(64)
                assert error(model.forward(x).numpy(), want) < 1e-5
        if constant:
            assert error(each.run(workers, x), want) < 1e-5
        else:
            with pytest.raises(
                axe.LowerError, match="forward takes packed weights, which are packed once: model = exe"
            ):
                each.run(workers, x, up, bias, down)


# ---- Other engines ---------------------------------------------------------------------------------------------------


JOB = Path(__file__).with_name("session_in_job.py")


def test_ranks_of_an_mpi_job(tmp_path: Path) -> None:
    """On two machines: a worker sees no memory of the controller, and reads the file for itself."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install tvm-axe[mpi]")
    try:
        command = ranks_command(2, [sys.executable, str(JOB), str(tmp_path / "model.safetensors")])
    except axe.InputError as error:
        pytest.skip(f"there is no mpiexec: {error}")
    environment = os.environ | {"TVM_AXE_RANKS_PER_HOST": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"error (\S+), copied 0, held \((\d+), (\d+)\)", done.stdout)
    assert len(lines) == 2 and all(float(error) < 1e-5 for error, *_ in lines), done.stdout
    whole = 4 * (2 * 64 * 128 + 128)
    assert all(int(held) <= whole * 0.55 for _, *each in lines for held in each)


@pytest.mark.parametrize("where", ["apart-threads", "apart-staged-threads"])
def test_devices_with_memory_of_their_own(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "collective"))
    launched = importlib.import_module("apart").launched
    own = runpy.run_path(str(JOB))
    mod, _ = own["Pair"]().export_tvm({"forward": {"x": nn.spec.Tensor([8, 64], "float32")}})
    exe = axe.compile(mod, mesh=MESH, work_dir=None, pins=own["PINS"])
    x, up, bias, down = own["drawn"]()
    write_safetensors(tmp_path / "model", {"up.weight": up, "up.bias": bias, "down.weight": down})
    with launched(MESH, where) as workers, exe.load(workers, tmp_path / "model") as model:
        for _ in range(2):
            once = model.forward(x)
            got = model.forward(once).numpy()
        want = x.astype("float64")
        for _ in range(2):
            want = np.maximum(want @ up.T + bias, 0) @ down.T
        assert error(got, want) < 1e-5


class Lender:
    """Has tensors, of which nothing is asked."""

    closed = False

    def mesh_tensor(self, _shape: object, _dtype: str, _shared: bool) -> Lent:
        return Lent()

    def free(self, _tensor: Lent) -> None:
        pass


class Lent:
    """A tensor that closes a pool as soon as anybody looks for it there, as another thread might."""

    closes: Pool | None = None

    def __hash__(self) -> int:
        pool, self.closes = self.closes, None
        if pool is not None:
            pool.close()
        return id(self)


def test_a_value_goes_while_its_session_is_closed() -> None:
    """The garbage collector takes it in any thread, such as one of a GPU's, while another one closes the session."""
    lender = Lender()
    pool = Pool(lender)
    tensors = [pool.take((4,), "float32") for _ in range(3)]
    pool.give(tensors[0])
    tensors[1].closes = pool
    pool.give(tensors[1])
    pool.give(tensors[2])
    assert tensors[1].closes is None and not pool._all


class Shared(nn.Module):
    """A layer that is applied twice."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False)

    def forward(self, x: Any) -> Any:
        for _ in range(2):
            x = op.add(x, self.down(op.relu(self.up(x))))
        return x


def test_what_two_calls_of_a_function_pack_alike_is_packed_once(workers: axe.Workers) -> None:
    mod, _ = Shared().export_tvm({"forward": {"x": nn.spec.Tensor([4, 64], "float32")}})
    rng = np.random.default_rng(6)
    up, down = (rng.standard_normal(shape, dtype="float32") / 8 for shape in ((32, 64), (64, 32)))
    weights = {"up.weight": tvm.runtime.tensor(up), "down.weight": tvm.runtime.tensor(down)}
    exe = axe.compile(tvm.relax.transform.BindParams("forward", weights)(mod), mesh=MESH, work_dir=None)
    made = [one.name for pack in exe.shared.packs for one in pack.made]
    assert made and len(made) == len({*made}) < 4
    want = X.astype("float64")
    for _ in range(2):
        want = want + np.maximum(want @ up.T, 0) @ down.T
    assert error(exe.run(workers, X), want) < 1e-5
