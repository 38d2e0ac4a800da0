"""The script that measures a layer on a mesh of GPUs: our results on CPU workers, and what devices of the peer have."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
script = pytest.importorskip("bench_models_mesh_gpu", reason="PyTorch is not installed")


def test_our_side_of_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--engine", "threads", "--rounds", "1", "--reps", "1", "--breakdown", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(found) == len(script.table(tiny=True)) == len(script.table(tiny=False)) == 3
    assert all(row["peer"] is None and row["ours_ms"] > 0 and row["errors"]["ours"] < 1e-5 for row in found)


def test_a_wrong_result_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.Ours, "result", lambda ours: torch.zeros(1, 32, 64))
    assert script.main(["--engine", "threads", "--rounds", "1", "--reps", "1", "--rows", "prefill"]) == 1


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_what_devices_of_the_peer_have_makes_the_layer(kind: str) -> None:
    case = script.case_of(kind, (8,) if kind == "prefill" else (3, 8), script.TINY)
    whole, inputs = case.made()
    wanted = script.exact(whole, inputs, "cpu")
    met, terms, found = threading.Barrier(2), dict[int, Any](), dict[int, Any]()

    def device(rank: int) -> None:
        def add(x: Any) -> Any:
            terms[rank] = x
            met.wait(60)
            total = terms[0] + terms[1]
            met.wait(60)
            return total

        part = script.share(whole, rank, 2, add)
        own = tuple(each.chunk(2, 1)[rank].contiguous() if each.ndim == 4 else each for each in inputs)
        found[rank] = script.first_of(script.without_gradients(part, own)())

    threads = [threading.Thread(target=device, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(script.error(found[rank], wanted) < 1e-6 for rank in range(2))


def test_without_gpus_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "refusal", lambda shared: "this process sees 0 GPUs")
    assert script.main([]) == 1
    told = capsys.readouterr()
    assert "nothing is measured: this process sees 0 GPUs" in told.err and "--engine threads" in told.err
