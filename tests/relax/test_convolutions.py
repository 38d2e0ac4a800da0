"""Norms go into the weights of convolutions before them, and images have their channels last; results stay the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.relax.convolutions import with_convolutions

TARGET = resolve_target("llvm", threads=1)


def conv(x: np.ndarray, w: np.ndarray, stride: int, padding: int, groups: int = 1) -> np.ndarray:
    """A convolution of [N, C, H, W] by [O, C / groups, K, K], in float64."""
    x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    size = (x.shape[2] - w.shape[2]) // stride + 1
    own, out = x.shape[1] // groups, w.shape[0] // groups
    y = np.zeros((x.shape[0], w.shape[0], size, size))
    for g, r, c in itertools.product(range(groups), range(w.shape[2]), range(w.shape[3])):
        part = x[:, g * own : (g + 1) * own, r : r + stride * size : stride, c : c + stride * size : stride]
        y[:, g * out : (g + 1) * out] += np.einsum("ncyx,oc->noyx", part, w[g * out : (g + 1) * out, :, r, c])
    return y


class Net:
    """A stack of convolutions and norms that is built as a model and computed in float64 beside it."""

    def __init__(self, shape: tuple[int, ...], seed: int = 0) -> None:
        self.random, self.builder, self.shape = np.random.default_rng(seed), relax.BlockBuilder(), shape
        self.x = relax.Var("x", relax.TensorType(shape, "float32"))
        self.array = self.random.standard_normal(shape, "float32")

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, "float32")

    def conv(self, value, out: int, kernel: int = 3, stride: int = 1, groups: int = 1):
        data, want = value
        w = self.normal(out, want.shape[1] // groups, kernel, kernel) * 0.2
        call = relax.op.nn.conv2d(data, relax.const(w), strides=stride, padding=kernel // 2, groups=groups)
        return self.builder.emit(call), conv(want, w.astype("float64"), stride, kernel // 2, groups)

    def norm(self, value, epsilon: float = 1e-3, center: bool = True, scale: bool = True):
        data, want = value
        gamma, beta, mean = (self.normal(want.shape[1]) for _ in range(3))
        variance = np.square(self.normal(want.shape[1])) + 0.1
        given = [relax.const(each) for each in (gamma, beta, mean, variance)]
        tuple_ = self.builder.emit(
            relax.op.nn.batch_norm(data, *given, axis=1, epsilon=epsilon, center=center, scale=scale, training=False)
        )
        gamma, beta, mean, variance = (each.astype("float64")[:, None, None] for each in (gamma, beta, mean, variance))
        done = (want - mean) / np.sqrt(variance + epsilon) * (gamma if scale else 1) + (beta if center else 0)
        return self.builder.emit(relax.TupleGetItem(tuple_, 0)), done

    def relu(self, value):
        return self.builder.emit(relax.op.nn.relu(value[0])), np.maximum(value[1], 0)

    def add(self, one, other):
        return self.builder.emit(relax.op.add(one[0], other[0])), one[1] + other[1]

    def module(self, make) -> tuple[tvm.IRModule, np.ndarray]:
        with self.builder.function("main", [self.x]):
            with self.builder.dataflow():
                out, want = make(self, (self.x, self.array.astype("float64")))
                out = self.builder.emit_output(out)
            self.builder.emit_func_output(out)
        return self.builder.get(), want

    def check(self, module: tvm.IRModule, want: np.ndarray) -> None:
        got = axe.compile(module, target=TARGET, work_dir=None)(self.array)
        assert got.shape == want.shape
        assert np.abs(got - want).max() / np.abs(want).max() < 1e-5


def residual(net: Net, x):
    """A block of a ResNet, with a strided skip."""
    y = net.relu(net.norm(net.conv(x, 32, stride=2)))
    y = net.norm(net.conv(y, 32))
    return net.relu(net.add(y, net.norm(net.conv(x, 32, kernel=1, stride=2))))


def test_a_residual_block() -> None:
    net = Net((2, 16, 13, 13))
    module, want = net.module(residual)
    text = relax.transform.FoldConstant()(with_convolutions(module))["main"].script()
    assert text.count("batch_norm") == 0 and text.count('data_layout="NHWC"') == 3
    assert text.count("R.permute_dims") == 3  # of the image for each that reads it, and of the result
    net.check(module, want)


@pytest.mark.parametrize(("center", "scale"), [*itertools.product((True, False), repeat=2)])
def test_norms_without_a_factor_or_a_shift(center: bool, scale: bool) -> None:
    net = Net((1, 8, 6, 6), seed=1)
    module, want = net.module(lambda net, x: net.norm(net.conv(x, 16), center=center, scale=scale, epsilon=0.3))
    text = with_convolutions(module)["main"].script()
    assert "batch_norm" not in text and "NHWC" not in text  # there is but one convolution
    net.check(module, want)


def test_channels_apart_stay_along_rows() -> None:
    net = Net((1, 16, 12, 12), seed=2)
    module, want = net.module(lambda net, x: net.conv(net.norm(net.conv(net.conv(x, 16), 16, groups=16)), 8))
    text = with_convolutions(module)["main"].script()
    assert "batch_norm" not in text and "NHWC" not in text
    net.check(module, want)


def test_groups_have_channels_last() -> None:
    net = Net((1, 16, 9, 9), seed=3)
    module, want = net.module(lambda net, x: net.conv(net.relu(net.norm(net.conv(x, 32, groups=4))), 16, groups=2))
    assert with_convolutions(module)["main"].script().count('data_layout="NHWC"') == 2
    net.check(module, want)


def test_what_else_reads_a_convolution_has_it_as_it_was() -> None:
    net = Net((1, 8, 6, 6), seed=4)

    def both(net: Net, x):
        y = net.conv(x, 16)
        return net.add(y, net.norm(y))

    module, want = net.module(both)
    assert with_convolutions(module)["main"].script().count("batch_norm") == 1
    net.check(module, want)


def test_a_norm_of_another_dimension_stays() -> None:
    """It isn't the convolution's channels that it scales."""
    net = Net((1, 8, 6, 6), seed=5)

    def across(net: Net, x):
        data, want = net.conv(x, 6, kernel=1)
        given = [relax.const(each) for each in (net.normal(6), net.normal(6), net.normal(6), np.ones(6, "float32"))]
        y = net.builder.emit(relax.op.nn.batch_norm(data, *given, axis=2, training=False))
        gamma, beta, mean, variance = (each.value.numpy().astype("float64")[:, None] for each in given)
        done = (want - mean) / np.sqrt(variance + 1e-5) * gamma + beta
        return net.builder.emit(relax.TupleGetItem(y, 0)), done

    module, want = net.module(across)
    assert with_convolutions(module)["main"].script().count("batch_norm") == 1
    net.check(module, want)


@pytest.mark.parametrize("name", ["permute_dims", "squeeze", "stack"])
def test_dimensions_counted_from_the_back(name: str) -> None:
    """Upstream's pass takes them for others, or runs out of memory."""
    net = Net((2, 8, 6, 6), seed=6)

    def counted(net: Net, x):
        (data, want), op, emit = net.conv(net.conv(x, 8), 4), relax.op, net.builder.emit
        if name == "permute_dims":
            return emit(op.permute_dims(data, [0, -1, -3, -2])), want.transpose(0, 3, 1, 2)
        if name == "squeeze":
            return emit(op.squeeze(emit(op.expand_dims(data, 1)), [-4])), want
        return emit(op.stack([data, emit(op.nn.relu(data))], -2)), np.stack([want, np.maximum(want, 0)], -2)

    module, want = net.module(counted)
    assert with_convolutions(module)["main"].script().count('data_layout="NHWC"') == 2
    net.check(module, want)


def test_transposed_convolutions_between_others() -> None:
    """They keep their channels where they are: upstream has no function for them with channels last."""
    net = Net((2, 8, 6, 6), seed=7)

    def up(net: Net, x):
        data, want = net.conv(net.conv(x, 8), 4)
        w = net.normal(4, 5, 2, 2)
        call = net.builder.emit(relax.op.nn.conv2d_transpose(data, relax.const(w), strides=2))
        larger = np.einsum("ncyx,cokl->noykxl", want, w.astype("float64")).reshape(2, 5, 12, 12)
        return net.conv((call, larger), 3)

    net.check(*net.module(up))
