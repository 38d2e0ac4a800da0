"""The numpy references that programs are judged by are the formulas of the papers, element by element."""

import math

import numpy as np
import pytest

from tvm_axe.layout import Mesh
from tvm_axe.programs import PROGRAMS, dropout
from tvm_axe.programs.updates import bucket_of


def case(name: str, **axes: int):
    program = PROGRAMS[name](Mesh(axes), "uneven")
    arrays = program.inputs(np.random.default_rng())
    return arrays, program.reference(*arrays)


def in_float64(arrays):
    return [array.astype("float64") if array.dtype.kind == "f" else array for array in arrays]


def adam_step(g, p, m, v, powers):
    """m, v and the step without the learning rate, of single numbers (Kingma and Ba, 2015, algorithm 1)."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return m, v, (m / (1 - powers[0])) / (math.sqrt(v / (1 - powers[1])) + 1e-8)


@pytest.mark.parametrize("name", ["adam", "adam_f16"])
def test_adam(name):
    arrays, outputs = case(name, dp=3)
    g, p, m, v, lr, powers = in_float64(arrays)
    mean = g.mean(axis=0)
    for at in ((0, 0), (5, 3), (40, 6)):
        m_at, v_at, step = adam_step(mean[at], p[at], m[at], v[at], powers)
        expected = [p[at] - lr[0] * step, m_at, v_at]
        np.testing.assert_allclose([output[at] for output in outputs[:3]], expected, rtol=1e-12)
    assert len(outputs) == (3 if name == "adam" else 4)
    np.testing.assert_array_equal(outputs[-1], outputs[0] if name == "adam_f16" else outputs[2])


def test_sgd():
    arrays, (p_out, m_out) = case("sgd", dp=2)
    g, p, m, lr = in_float64(arrays)
    momentum = 0.9 * m + (g[0] + g[1]) / 2
    np.testing.assert_allclose(m_out, momentum, rtol=1e-12)
    np.testing.assert_allclose(p_out, p - lr[0] * momentum, rtol=1e-12)


def test_lamb_by_tensor():
    """You et al., 2020, algorithm 2, on the tensors as a model has them."""
    arrays, outputs = case("lamb", dp=2)
    g, p, m, v, owner, lr, powers = in_float64(arrays)
    bucket = bucket_of("uneven")
    mean = g.mean(axis=0)
    matrices = [np.ascontiguousarray(matrix) for matrix in (mean, p, m, v, outputs[0])]
    for name, shape in bucket.shapes.items():
        of_g, of_p, of_m, of_v, out = (bucket.views(matrix)[name].reshape(-1) for matrix in matrices)
        steps = [adam_step(*numbers, powers)[2] for numbers in zip(of_g, of_p, of_m, of_v)]
        u = np.array(steps) + 0.01 * of_p
        expected = of_p - lr[0] * np.linalg.norm(of_p) / np.linalg.norm(u) * u
        np.testing.assert_allclose(out.reshape(shape), expected.reshape(shape), rtol=1e-10, err_msg=name)
    assert owner.tolist() == bucket.owners.tolist()


def test_lamb_leaves_a_tensor_of_zeros_to_adam():
    """Its norm gives no scale, and must not make the others' NaN."""
    program = PROGRAMS["lamb"](Mesh({"dp": 1}), "uneven")
    arrays = program.inputs(np.random.default_rng())
    rows = bucket_of("uneven").rows["norm1.scale"]
    arrays[1][rows] = 0
    p_out, m_out, v_out = program.reference(*arrays)
    _, _, _, _, _, lr, powers = in_float64(arrays)
    step = (m_out / (1 - powers[0])) / (np.sqrt(v_out / (1 - powers[1])) + 1e-8)
    np.testing.assert_allclose(p_out[rows], -lr[0] * step[rows], rtol=1e-10)


def test_attention():
    arrays, (out,) = case("attention", tp=1)
    x, w_qkv, w_o, bias, residual, seed = in_float64(arrays)
    batch, seq, _ = x.shape
    heads, d = w_qkv.shape[1], w_qkv.shape[3]
    product = np.zeros_like(x)
    for b in range(batch):
        for h in range(heads):
            q, k, v = (x[b] @ w_qkv[part, h] for part in range(3))
            for i in range(seq):
                weights = np.exp([q[i] @ k[j] / math.sqrt(d) for j in range(seq)])
                product[b, i] += (weights / weights.sum()) @ v @ w_o[h]
    index = np.arange(out.size).reshape(out.shape)
    expected = dropout(product + bias, seed, index, 0.1) + residual
    np.testing.assert_allclose(out, expected, atol=1e-12)


def test_norm():
    arrays, (out,) = case("norm", tp=1)
    x, w, residual, gamma = in_float64(arrays)
    for i, row in enumerate(out):
        hidden = x[i] @ w + residual[i]
        np.testing.assert_allclose(row, hidden / math.sqrt((hidden**2).mean() + 1e-6) * gamma, atol=1e-12)


def test_stage_follows_the_one_before():
    arrays, (out,) = case("pipeline", pp=3, tp=1)
    x, w, bias, residual, seed = in_float64(arrays)
    for stage in range(3):
        index = stage * out[0].size + np.arange(out[0].size).reshape(out[0].shape)
        expected = dropout(x[stage - 1] @ w[stage - 1] + bias[stage], seed, index, 0.1) + residual[stage]
        np.testing.assert_allclose(out[stage], expected, atol=1e-12)


def test_mlp():
    arrays, (out,) = case("mlp", tp=1)
    x, w, bias, residual, seed = in_float64(arrays)
    product = np.array([[math.fsum(row * column) for column in w.T] for row in x])
    index = np.arange(out.size).reshape(out.shape)
    np.testing.assert_allclose(out, dropout(product + bias, seed, index, 0.1) + residual, atol=1e-12)
