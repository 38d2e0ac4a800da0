"""Recording a program's calls, with each engine; see conftest.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_axe.collective import Called, Recording, WorkerError, Workers, launch, worker
from tvm_axe.collective.recording import Recorder, aligned
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target


def doubled_sum(axis: str, n: int) -> tvm.IRModule:
    @I.ir_module
    class DoubledSum:
        @T.prim_func(s_tir=True)
        def double(X: T.Buffer((64,), "float32"), Y: T.Buffer((64,), "float32")):
            for i in T.grid(64):
                with T.sblock("double"):
                    vi = T.axis.spatial(64, i)
                    Y[vi] = X[vi] * T.float32(2)

        @R.function(pure=False)
        def main(
            x: R.Tensor((64,), "float32"),
            y: R.Tensor((64,), "float32"),
            y_all: R.Tensor((n, 64), "float32"),
            z_all: R.Tensor((n, 64), "float32"),
        ):
            R.func_attr({"relax.force_pure": False})
            cls = DoubledSum
            _: R.Tuple() = cls.double(x, y)
            _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            _2: R.Tuple() = R.call_packed("axe.all_reduce", y_all, z_all, R.str(axis), sinfo_args=(R.Tuple(),))
            return R.tuple()

    return DoubledSum


def loaded(workers: Workers):
    """The program, its arguments and its result, of the mesh's last axis; and what the result should be."""
    axis = workers.mesh.names[-1]
    x, y, z = (workers.mesh_tensor((64,), "float32") for _ in range(3))
    for device in range(workers.mesh.size):
        x.slab(device)[:] = np.random.default_rng(device).integers(-9, 9, 64)
        y.slab(device)[:] = z.slab(device)[:] = np.nan
    total = [
        sum(2 * x.slab(peer).astype("float64") for peer in workers.mesh.group(device, axis))
        for device in range(workers.mesh.size)
    ]
    program = workers.load(doubled_sum(axis, workers.mesh[axis]), resolve_target(workers.target))
    return program, [(x, "slab"), (y, "slab"), (y, axis), (z, axis)], z, total


def test_what_a_program_calls_when(workers: Workers) -> None:
    program, arguments, result, total = loaded(workers)
    recordings = workers.trace(program, arguments, calls=3)
    assert len(recordings) == workers.mesh.size
    for device, found in enumerate(recordings):
        # Of a linked program, it is the function that stands for what the program calls.
        names = [re.sub(r"^axe_(\w+?)(_?\d+)?$", r"axe.\1", call.name) for call in found.calls]
        # Devices that meet by themselves do so in the collective.
        meets = 2 if names[1] == "axe.merged" else 1
        meeting = ["axe.merged", "axe.all_reduce:behind"] if meets == 2 else ["axe.barrier", "axe.all_reduce"]
        assert names == ["double", *meeting]
        times = [found.start, *(at for call in found.calls for at in (call.start, call.stop)), found.stop, found.left]
        assert times == sorted(times) and len(set(times[1:-2])) == 6
        np.testing.assert_array_equal(result.slab(device), total[device])
    assert min(found.start for found in recordings) == 0 and len({found.clock for found in recordings}) == 1
    # Nobody leaves the meeting before the last has come to it.
    arrived = max(found.calls[meets].start for found in recordings)
    assert all(found.calls[meets].stop > arrived for found in recordings)
    assert all(found.left > max(other.stop for other in recordings) for found in recordings)


def test_only_the_last_run_is_recorded(pair: Workers) -> None:
    program, arguments, *_ = loaded(pair)
    for warmup in (0, 3):
        recordings = pair.trace(program, arguments, calls=3, warmup=warmup)
        assert [len(found.calls) for found in recordings] == [3, 3]


def test_other_runs_are_not_watched(two: Mesh, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0, or each, is a thread of this process, so that its recorder can be counted."""
    seen = []

    class Counted(Recorder):
        def __call__(self, *arguments: object) -> None:
            seen.append(arguments)
            super().__call__(*arguments)

    monkeypatch.setattr(worker, "Recorder", Counted)
    with launch(two, engine=engine) as pair:
        program, arguments, *_ = loaded(pair)
        pair.call(program, arguments)
        assert not seen
        pair.trace(program, arguments, calls=3)
        assert seen
        seen.clear()
        pair.call(program, arguments)
        pair.time(program, arguments, repeat=2)
        assert not seen


def test_more_calls_than_there_is_room_for(pair: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    program, arguments, result, total = loaded(pair)
    monkeypatch.setattr(Recording, "room", lambda calls: 128)
    with pytest.raises(WorkerError, match=r"(?s)trace: the program makes 3 calls, .*room for 128: expect more calls"):
        pair.trace(program, arguments, calls=3)
    pair.call(program, arguments)
    np.testing.assert_array_equal(result.slab(1), total[1])


@pytest.mark.parametrize("numbers", [{"calls": -1}, {"calls": 3, "warmup": -1}])
def test_bad_numbers_are_refused(pair: Workers, numbers: dict[str, int]) -> None:
    program, arguments, *_ = loaded(pair)
    with pytest.raises(InputError, match="trace: calls and warmup must be at least 0"):
        pair.trace(program, arguments, **numbers)
    with pytest.raises(InputError, match="no function 'other'; it has main"):
        pair.trace(program, arguments, calls=3, function="other")


def test_a_recording_is_read_as_it_was_written() -> None:
    written = Recording((Called("mm", 12, 10**15), Called("axe.wait", 10**15 + 1, 10**15 + 7)), 3, 4, 5, "clock")
    memory = np.full(Recording.room(2), 255, "uint8")
    written.write(memory)
    assert Recording.read(memory) == written
    long = Recording((Called("m" * 900, 1, 2), *written.calls), 3, 4, 5, "clock")
    with pytest.raises(InputError, match=r"3 calls, which take \d+ bytes to write down; there is room for 768"):
        long.write(memory)


def test_calls_within_calls_are_recorded_in_the_order_in_which_they_began() -> None:
    finished: list[bool] = []
    recorder = Recorder(lambda: finished.append(True))
    for name, before in [("a", True), ("b", True), ("vm.builtin.x", True), ("vm.builtin.x", False), ("b", False)]:
        recorder(None, name, before, None)
    recorder(None, "a", False, None, "an argument")
    outer, inner = recorder.calls
    assert (outer.name, inner.name) == ("a", "b")
    assert outer.start <= inner.start <= inner.stop <= outer.stop
    assert len(finished) == 6  # before each look at the clock


def test_clocks_of_several_machines_start_together() -> None:
    def at(start: int, clock: str) -> Recording:
        return Recording((Called("mm", start + 10, start + 20),), start, start + 30, start + 40, clock)

    here, late, there = aligned([at(1000, "here"), at(1005, "here"), at(7_000_000, "there")])
    assert here == at(0, "here") and late == at(5, "here") and there == at(0, "there")
