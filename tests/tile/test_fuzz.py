"""Random tile programs on every target, beside the interpreter: integers as data, so that every bit counts."""

import pytest
from generator import Maker
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from interpreter import TooLarge
from judging import drawn, judge, wanted

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Compiled programs don't fill the user's cache."""
    return Cache(tmp_path_factory.mktemp("cache"))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_llvm(store, data):
    strided = data.draw(st.booleans())
    made = Maker(lambda options: data.draw(st.sampled_from(list(options))), strided=strided).make()
    program = made.program
    try:
        expected = wanted(made, program)
    except TooLarge:
        assume(False)
    judge(tile.compile(program, "llvm", store), made, expected)


def lowered(seeds: range, target: str, sizes: str, options: str = "", strided: bool = False):
    """Programs that the target takes, each as read and with what it should give; no more than half are refused."""
    programs, refused = [], 0
    for seed in seeds:
        made = drawn(seed, sizes, options, strided)
        program = made.program
        try:
            expected = wanted(made, program)
            tile.lower(program, target)
            programs.append((made, program, expected))
        except TileError:  # a CPU takes all of them; a GPU's registers and shared memory are few
            refused += 1
        except TooLarge:
            pass
    assert refused <= len(seeds) // 2
    return programs


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
@pytest.mark.parametrize("sizes", ["small", "tiled"])
@pytest.mark.parametrize("strided", [False, True])
def test_cuda_lowers_or_refuses(target, sizes, strided):
    """Nothing but a TileError leaves a lowering."""
    assert lowered(range(15), target, sizes, strided=strided)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", ', roles="uniform"'], ids=["inferred", "uniform"])
@pytest.mark.parametrize("sizes", ["small", "tiled"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("seeds", [range(first, first + 10) for first in range(0, 40, 10)], ids=str)
def test_cuda(cuda, store, seeds, strided, sizes, options):
    programs = lowered(seeds, "cuda", sizes, options, strided)
    executables = tile.compile_all([program for _, program, _ in programs], "cuda", store)
    for executable, (made, _, expected) in zip(executables, programs, strict=True):
        judge(executable, made, expected)
