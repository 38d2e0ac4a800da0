"""The script that measures a mesh of GPUs: our side of its rows on CPU workers, and what it says without GPUs."""

from __future__ import annotations

import json

import bench_mesh_gpu as script
import pytest

from tvm_axe.collective.cuda import driver
from tvm_axe.errors import InputError


@pytest.fixture(autouse=True)
def type_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.pairs, "DTYPE", script.pairs.DTYPE)  # what the script sets


def test_our_side_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = [
        "all_reduce, 256",
        *script.COLLECTIVES[1:],
        "norm of all-reduce and residual, 1 x",
        "fuse",
        "GEMM",
        "all-g",
    ]
    arguments = ["--engine", "threads", "--rounds", "1", "--reps", "1", "--json", "--rows", *wanted, "dispatch"]
    assert script.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["engine"], found["devices"]) == ("threads", 2)
    rows = {row["name"]: row for row in found["rows"]}
    table = script.table(2, tiny=True)
    assert {row.peer for row in table if row.name in rows} == {row.peer for row in table}
    assert {row.kind for row in table} == {row.kind for row in script.table(2, tiny=False)}
    assert all(row["peer"] is None for row in rows.values())
    # Of collectives the difference of two times is reported, and these are too short to be above noise.
    assert all(row["ours_us"] > 0 for name, row in rows.items() if name.startswith(("fuse", "GEMM", "dispatch")))


def test_a_wrong_result_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: object) -> None:
        return None

    monkeypatch.setattr(script.Workers, "call", wrong)
    with pytest.raises(RuntimeError, match="all_to_all of 2048 bytes: device 0 has other numbers"):
        script.main(["--engine", "threads", "--rounds", "1", "--reps", "1", "--rows", "all_to_all"])


def test_without_gpus_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        if driver.gpus() > 1:
            pytest.skip("there are GPUs")
    except InputError:
        pass  # which is what it is to say
    assert script.main([]) == 1
    told = capsys.readouterr()
    assert "nothing is measured: " in told.err and "--engine threads" in told.err and not told.out


def test_graphs_of_theirs_are_as_long_as_ours() -> None:
    """Both sides' time of one is the difference of the same two graphs, on the slowest device."""

    class Peers:
        names = ("NCCL", "NCCL" + script.MANY)

        def run(self, name: str, reps: int) -> list[float]:
            few, many = script.in_a_graph(16 << 10)
            return [(many if name.endswith(script.MANY) else few) * 2e-6 + 30e-6] * reps

    row = script.Row("all_reduce", "all_reduce", (16 << 10,), None, script.Moved)
    assert script.rival(Peers(), "NCCL", row, 3) == pytest.approx([2e-6] * 3)
    assert script.in_a_graph(1) == (20, 60) and script.in_a_graph(256 << 20) == (1, 3)
    told: list[int] = []
    chained = object.__new__(script.Moved)
    chained.torch = None
    script.captured, kept = (lambda torch, told_, times: told.append(times)), script.captured
    try:
        assert set(chained.chained("NCCL", None, 4 << 20)) == {"NCCL", "NCCL" + script.MANY}
    finally:
        script.captured = kept
    assert tuple(told) == script.in_a_graph(4 << 20)
