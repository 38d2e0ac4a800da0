"""Made-up requests are the same for a seed; each program of the table runs on them and equals numpy."""

import numpy as np
import pytest

from tvm_axe.stream import StreamError
from tvm_axe.stream.programs.samples import PROGRAMS, SMALL, make_sample
from tvm_axe.stream.programs.workloads import MIXTRAL_8X7B, QWEN3_30B_A3B, MoE, lengths, routing


@pytest.mark.parametrize("moe", [MIXTRAL_8X7B.moe, QWEN3_30B_A3B.moe], ids=["mixtral", "qwen"])
def test_tokens_choose_different_experts(moe):
    chosen = routing(64, moe, seed=5)
    assert chosen.shape == (64, moe.chosen) and chosen.min() >= 0 and chosen.max() < moe.experts
    assert all(len(set(row)) == moe.chosen for row in chosen.tolist())
    assert np.array_equal(chosen, routing(64, moe, seed=5)) and not np.array_equal(chosen, routing(64, moe, seed=6))


def test_many_experts_are_left_out_as_in_traces():
    loads = np.bincount(routing(64, QWEN3_30B_A3B.moe, seed=0).ravel(), minlength=128)
    assert 40 < (loads > 0).sum() < 110 and loads.max() > 20


def test_lengths_are_uneven():
    found = lengths(1000, seed=1)
    assert found.min() >= 1 and 800 < np.median(found) < 1300 and np.mean(found == 4080) > 0.04


@pytest.mark.parametrize("draw", [lambda: routing(0, MIXTRAL_8X7B.moe), lambda: lengths(0)])
def test_an_empty_batch(draw):
    with pytest.raises(StreamError, match="batch must be 1 or more, not 0"):
        draw()


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_numpy(name):
    sample = make_sample(name, SMALL, batch=5, seed=3)
    report = sample.run()
    assert sample.error(report) < 1e-5
    assert report.cycles == sample.run(values=False).cycles > 0


def test_a_wrong_result_is_seen():
    sample = make_sample("moe-dynamic", SMALL, batch=5, seed=3)
    report = sample.run()
    report.tensors["y"][2, 3] += 1
    assert sample.error(report) > 0.01
    report.tensors["y"][2, 3] = np.nan
    assert np.isnan(sample.error(report))


@pytest.mark.parametrize("chosen", [0, 5])
def test_experts_that_cannot_be_chosen(chosen):
    with pytest.raises(StreamError, match=f"chosen={chosen} must be between 1 and the number of experts, 4"):
        MoE(experts=4, chosen=chosen, width=8, hidden=8)


def test_no_such_program():
    with pytest.raises(StreamError, match="no program 'moe'; there are moe-static, moe-dynamic"):
        make_sample("moe", SMALL, 4, 0)
