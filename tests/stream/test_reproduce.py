"""The published results come out again, each within the stated error, and the headline ratios with them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tvm_axe.errors import InputError
from tvm_axe.stream import Accelerator
from tvm_axe.stream.programs.cached_attention import attention, attention_inputs, cached_tiles
from tvm_axe.stream.programs.moe import moe_inputs, moe_layer
from tvm_axe.stream.programs.reference import attention_reference, moe_reference
from tvm_axe.stream.programs.workloads import MIXTRAL_8X7B, QWEN3_30B_A3B, Heads
from tvm_axe.stream.published import DATA, read_points
from tvm_axe.stream.reproduce import pareto_improvement, reproduce


@pytest.fixture(scope="module")
def found():
    """All of it, once."""
    return reproduce()


@pytest.fixture(scope="module")
def ratios(found):
    return {ratio.name: ratio for ratio in found.ratios}


def errors(found, start, end=""):
    picked = [abs(row.error) for row in found.rows if row.point.set.startswith(start) and row.point.name.endswith(end)]
    assert picked
    return np.array(picked)


def test_every_published_result_is_there(found):
    lines = sum(len(file.read_text().strip().splitlines()) - 1 for file in (DATA / "published").glob("*tiling*.csv"))
    lines += sum(len(file.read_text().strip().splitlines()) - 1 for file in (DATA / "published").glob("*time*.csv"))
    windows = sum(len(file.read_text().strip().splitlines()) - 1 for file in (DATA / "published").glob("*paral*.csv"))
    assert len(found.rows) == lines + 3 * windows == 76


def test_time_multiplexing(found):
    sweep = errors(found, "time_multiplexing")
    assert sweep.mean() <= 0.01 and sweep.max() <= 0.02


def test_tiling(found):
    assert errors(found, "dynamic_tiling").max() <= 0.02


@pytest.mark.parametrize(("way", "most"), [("coarse", 0.01), ("dynamic", 0.01), ("interleaved", 0.05)])
def test_attention(found, way, most):
    assert errors(found, "dynamic_parallelization", way).max() <= most


def test_eighty_requests_in_four_regions(tmp_path):
    """One window of the artifact's batch80_sweep_combined.csv is in two that come with the package."""
    first, second = (
        np.load(DATA / f"kv_traces/b64/conv_stdev{name}.npy") for name in ("1457_0961_1024", "1226_1013_1076")
    )
    assert (first[1013 - 961 :] == second[: 1025 - 1013]).all()
    requests = np.concatenate([first, second[1025 - 1013 :]])[981 - 961 : 1061 - 961]
    for folder in ("published", "kv_traces/b80"):
        (tmp_path / folder).mkdir(parents=True)
    np.save(tmp_path / "kv_traces/b80/conv_stdev1413_0981_1060.npy", requests)
    names = "stdev,start_idx,end_idx,static_coarse_cycles,static_interleave_cycles,dynamic_cycles"
    (tmp_path / "published/dynamic_parallelization_b80.csv").write_text(f"{names}\n1413,981,1060,146206,128165,82225\n")
    coarse, interleaved, dynamic = reproduce(tmp_path).rows
    assert abs(coarse.error) < 0.001 and abs(dynamic.error) < 0.002 and abs(interleaved.error) < 0.01


def test_bytes_are_the_published_ones(found):
    for row in found.rows:
        for name in ("off_chip", "on_chip"):
            published = getattr(row.point, name)
            assert published is None or getattr(row.outcome, name) == published, (row.point, name)


@pytest.mark.parametrize(
    "name",
    [
        "time-multiplexing, static32 tiles: utilization",
        "time-multiplexing, dynamic tiles: utilization",
        "dynamic over coarse, batch 16",
        "dynamic over coarse, batch 64",
        "Pareto improvement of dynamic tiles, mixtral",
        "Pareto improvement of dynamic tiles, qwen",
    ],
)
def test_headline_ratios(ratios, name):
    ratio = ratios[name]
    assert ratio.ours == pytest.approx(ratio.paper, rel=0.01)
    assert ratio.published is None or ratio.ours == pytest.approx(ratio.published, rel=0.01)


def test_equal_resources(ratios):
    # Where coarse has as many regions, dynamic gains much less; utilization is gained all the same.
    assert ratios["dynamic over coarse, batch 16: equal compute"].ours < 1.1
    assert 1 < ratios["dynamic over coarse, batch 16: 9 windows, equal compute"].ours < 2
    assert ratios["time-multiplexing, static32 tiles: equal compute"].ours > 1.1
    equal = ratios["Pareto improvement of dynamic tiles, qwen: equal"].ours
    assert 1 < equal < ratios["Pareto improvement of dynamic tiles, qwen"].ours


def test_json_and_text(found):
    read = json.loads(found.json())
    assert set(read) == {"rows", "ratios", "wall_s"}
    for row, said in zip(found.rows, read["rows"]):
        assert said["error"] == pytest.approx(said["cycles"] / said["published"] - 1)
        assert (said["set"], said["point"]) == (row.point.set, row.point.name)
    assert read["ratios"]["dynamic over coarse, batch 64"]["paper"] == 1.43
    text = found.text()
    assert "time_multiplexing_qwen_dynamic: mean error" in text and "0996_4007_4070 coarse" in text
    assert f"{len(found.rows)} published results" in text


def test_pareto_improvement():
    front = [(150, 10), (101, 20), (100, 40)]
    assert pareto_improvement((100, 10), front) == 1.5
    assert pareto_improvement((100, 5), front) == 2
    assert pareto_improvement((200, 20), front) < 1


class TestBadFolders:
    def test_empty(self, tmp_path):
        with pytest.raises(InputError, match=r"no published results: published/\*\.csv are expected there"):
            read_points(tmp_path)

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("energy_b16", "batch\n16\n", "of no known kind: dynamic_tiling"),
            ("dynamic_tiling_llama_b64", "tile_N\n1\n", "the models are mixtral, qwen, not llama"),
            ("dynamic_tiling_qwen_b64", "tile_N\n1\n", r"qwen_b64\.npz: cannot be read"),
            ("time_multiplexing_qwen_dynamic", "batch,regions\n64,8\n", r"qwen_b64\.npz: cannot be read"),
            ("dynamic_parallelization_b16", "stdev,start_idx\nhigh,3\n", "a row is not as expected"),
        ],
    )
    def test_files(self, tmp_path, name, text, message):
        (tmp_path / "published").mkdir()
        (tmp_path / f"published/{name}.csv").write_text(text)
        with pytest.raises(InputError, match=message):
            read_points(tmp_path)


class TestRealRequests:
    """The programs equal numpy on the published inputs, with small matrices."""

    @pytest.mark.parametrize("tile", [16, None])
    @pytest.mark.parametrize("model", [MIXTRAL_8X7B, QWEN3_30B_A3B], ids=["mixtral", "qwen"])
    def test_routing(self, model, tile):
        routing = np.load(DATA / f"moe_routing/{model.name}_b64.npz")["data"]
        moe = replace(model.moe, width=24, hidden=16)
        program = moe_layer(moe, len(routing), tile, 8, regions=8)
        rng = np.random.default_rng()
        given = {
            name: rng.standard_normal((tensor.rows, tensor.columns), dtype="float32")
            for name, tensor in program.tensors.items()
            if name != "y"
        }
        report = program.run({**moe_inputs(routing), **given}, Accelerator())
        expected = moe_reference(given, routing, moe)["y"]
        np.testing.assert_allclose(report.tensors["y"], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())

    def test_lengths(self):
        lengths = np.load(DATA / "kv_traces/b16/conv_stdev1455_0821_0836.npy")
        heads = Heads(groups=1, queries=2, size=8)
        cached = int(cached_tiles(lengths, 32).max())
        program = attention(heads, len(lengths), cached, "dynamic")
        rng = np.random.default_rng()
        given = {
            name: rng.standard_normal((tensor.rows, tensor.columns), dtype="float32")
            for name, tensor in program.tensors.items()
            if name != "out"
        }
        report = program.run({**attention_inputs(lengths, heads, "dynamic"), **given}, Accelerator(depth=1))
        expected = attention_reference(given, lengths, heads)["out"]
        np.testing.assert_allclose(report.tensors["out"], expected, rtol=1e-4, atol=1e-4)
