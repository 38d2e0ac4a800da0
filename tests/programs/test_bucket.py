"""Buckets: which rows a tensor has, and that views are the matrix's own memory."""

import numpy as np
import pytest

from tvm_axe import InputError
from tvm_axe.programs import Bucket

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 2, 2), "scalar": ()}


def test_each_tensor_has_rows_of_its_own():
    bucket = Bucket(SHAPES, width=5)
    assert bucket.rows == {"a": slice(0, 3), "b": slice(3, 4), "c": slice(4, 6), "scalar": slice(6, 7)}
    assert bucket.owners.tolist() == [0, 0, 0, 1, 2, 2, 3] and bucket.owners.dtype == np.int32
    assert bucket.shape == bucket.zeros().shape == (7, 5)


def test_views_are_the_matrix():
    bucket = Bucket(SHAPES, width=5)
    matrix = bucket.zeros()
    rng = np.random.default_rng()
    values = {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}
    for name, view in bucket.views(matrix).items():
        assert view.shape == SHAPES[name] and np.shares_memory(view, matrix)
        view[...] = values[name]
    padding = matrix.size - sum(value.size for value in values.values())
    assert (matrix == 0).sum() == padding
    for name, view in bucket.views(matrix.copy()).items():
        np.testing.assert_array_equal(view, values[name])


def test_gradients_of_each_device_in_one_array():
    bucket = Bucket(SHAPES, width=5)
    gradients = np.zeros((2, *bucket.shape), "float16")
    bucket.views(gradients[1])["b"][:] = 1
    assert gradients[0].sum() == 0 and gradients[1].sum() == 5


@pytest.mark.parametrize("matrix", [np.zeros((6, 5)), np.zeros((5, 7)).T, np.zeros((7, 10))[:, ::2]])
def test_views_of_something_else_are_refused(matrix):
    """A view of what isn't dense would be a copy."""
    with pytest.raises(InputError, match=r"a dense one of shape \(7, 5\), not of shape"):
        Bucket(SHAPES, width=5).views(matrix)


@pytest.mark.parametrize(
    ("shapes", "width", "message"),
    [
        (SHAPES, 0, "width must be at least 1, not 0"),
        ({}, 4, "there is no tensor"),
        ({"a": (2,), "none": (3, 0)}, 4, "every tensor needs an element, and none"),
    ],
)
def test_what_is_no_bucket(shapes, width, message):
    with pytest.raises(InputError, match=message):
        Bucket(shapes, width)
