"""`tvm-axe kernels`: lists, checks, refuses."""

import json

import numpy as np
import pytest

from tvm_axe import cli
from tvm_axe.tile.kernels import check


def run(*argv):
    return cli.main(["kernels", *argv])


def test_lists_kernels_with_their_parameters(capsys):
    assert run("matmul", "softmax") == 0
    text = capsys.readouterr().out
    assert "matmul: C = activation(A B + bias) + residual" in text
    assert "softmax: Y = exp(X) / the sum over its row" in text
    assert "block_rows" in text


def test_lists_all_as_json(capsys):
    assert run("--json", "--target", "cuda") == 0
    listed = {kernel["name"]: kernel for kernel in json.loads(capsys.readouterr().out)["kernels"]}
    assert set(listed) == set(check.KERNELS)
    assert all(values for kernel in listed.values() for values in kernel["parameters"].values())


def test_checks_and_prints_rows(capsys):
    assert run("transpose", "--check", "--json") == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)["rows"]
    assert len(rows) == len(check.KERNELS["transpose"].cases)
    assert rows[0] == {
        "kernel": "transpose", "shape": "rows=128 columns=192", "dtype": "float32", "target": "cpu",
        "relative_error": 0.0, "ok": True,
    }  # fmt: skip
    assert "data from seed" in err


def test_a_wrong_result_is_said_and_ends_with_1(capsys, monkeypatch):
    right = check.executed

    def wrong(*args):
        outputs = right(*args)
        outputs["Y"].ravel()[5] = np.nan
        return outputs

    monkeypatch.setattr(check, "executed", wrong)
    assert run("transpose", "--check", "--seed", "3") == 1
    out, err = capsys.readouterr()
    assert out.startswith("BAD transpose")
    assert "further off than rounding explains" in err


@pytest.mark.parametrize(
    "argv, message",
    [(["mathmul"], "no kernel mathmul; there are matmul"), (["--target", "tpu"], "--target is one of llvm, cuda")],
)
def test_refusals(capsys, argv, message):
    assert run(*argv) == 2
    assert message in capsys.readouterr().err
