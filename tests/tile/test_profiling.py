"""Profiles of tile programs: how what a kernel wrote is read, and that kernels that aren't profiled read no clock."""

import json

import numpy as np
import programs_hopper
import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import nvcc
from tvm_axe.tile.profiling import HEADER, LABELS, Role, Samples, Waited
from tvm_axe.timeline import WAITING


def written(samples, tracks):
    """Words as a kernel writes them: (block, role) to (first, last) of (clock, ns), the multiprocessor, and waits."""
    words = np.zeros((samples.blocks, len(samples.roles), samples.stride), "int64")
    for (block, role), (first, last, processor, waits) in tracks.items():
        words[block, role, :HEADER] = [first[0], first[1], last[0], last[1], len(waits), processor, 0, 0]
        for number, (begin, cycles, label) in enumerate(waits[: samples.most]):
            at = HEADER + 2 * number
            words[block, role, at : at + 2] = begin, cycles * LABELS + samples.label(label)
    return words.ravel()


def example():
    """Two cycles a nanosecond; multiprocessors whose clocks are far apart, and a block that didn't run."""
    samples = Samples(("consumer 0", "the producer"), blocks=3, most=2)
    waits = [(1_200, 400, "a to be loaded"), (2_000, 0, "products"), (2_400, 100, "products")]
    tracks = {
        (0, 0): ((1_000, 50_000), (5_000, 52_000), 7, waits),
        (0, 1): ((1_100, 50_000), (3_000, 51_000), 7, [(1_100, 1_000, "a free slot of a")]),
        (1, 0): ((900_000, 50_500), (902_000, 51_500), 3, []),
    }
    return samples.read("func", written(samples, tracks))


def test_clocks_become_nanoseconds_since_the_first_began():
    first, producer, other = example().roles
    waits = (Waited("a to be loaded", 100, 300), Waited("products", 500, 500))
    assert first == Role("consumer 0", 0, 7, 0, 2_000, waits, lost=1)
    assert producer == Role("the producer", 0, 7, 50, 1_000, (Waited("a free slot of a", 50, 550),))
    assert other == Role("consumer 0", 1, 3, 500, 1_500, ())


def test_the_table():
    assert str(example()).splitlines() == [
        "func: 2 blocks on 2 multiprocessors, 1.32 us each",
        "role          waits for         times  mean us  share",
        "consumer 0    a to be loaded        1    0.200     7%",
        "consumer 0    products              1    0.000     0%",
        "consumer 0    nothing                             93%",
        "the producer  a free slot of a      1    0.500    53%",
        "the producer  nothing                             47%",
        "1 more waits had no room, and count as nothing waited for",
    ]


def test_the_timeline(tmp_path):
    """Waits and the work between them, each at least as long as a viewer shows."""
    timeline = example().timeline()
    assert timeline.workers[0] == "block 0 (SM 7): consumer 0"
    track = [(event.name, event.kind == WAITING, event.start, event.stop) for event in timeline.track(0)]
    assert track == [
        ("consumer 0", False, 0, 100),
        ("a to be loaded", True, 100, 300),
        ("consumer 0", False, 300, 500),
        ("products", True, 500, 501),
        ("consumer 0", False, 501, 2_000),
    ]
    example().save(tmp_path / "profile.json")
    events = json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 5 + 2 + 1


def test_nothing_was_written():
    samples = Samples(("warp 0",), 1, 1)
    with pytest.raises(InputError, match="no block of func has written anything"):
        samples.read("func", np.zeros(samples.size, "int64"))


def copying():
    @T.prim_func
    def func(X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
        with tile.kernel(1) as _b:
            x = tile.shared((8,), "float32")
            tile.copy(X, x)
            tile.copy(x, Y)

    return func


def test_what_is_refused():
    x, y = np.zeros(8, "float32"), np.zeros(8, "float32")
    compiled = tile.compile(copying(), "llvm")
    with pytest.raises(TileError, match="llvm kernels don't write down when they wait; valid are targets of cuda"):
        compiled.profile(x, y)
    with pytest.raises(InputError, match="blocks and most are at least 1, warmup at least 0, got 0, 1024 and 1"):
        compiled.profile(x, y, blocks=0)


def _has_compiler():
    try:
        return bool(nvcc.find_compiler())
    except TileError:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="neither nvcc nor nvrtc on this machine")

PROGRAMS = {
    "product": (
        programs_hopper.matmul(512, 512, 512),
        "sm_90a",
        {"a, b to be loaded", "a free slot of a, b", "products"},
    ),
    "attention": (programs_hopper.attention(2, 3, 768), "sm_90a", {"its turn", "v to be loaded"}),
    "uniform": (programs_hopper.matmul(512, 512, 512), "sm_80", {"loads of loop l", "the other warps"}),
}


@needs_compiler
@pytest.mark.parametrize("case", PROGRAMS)
def test_only_a_kernel_that_is_profiled_reads_clocks(case):
    func, arch, labels = PROGRAMS[case]
    compiled = tile.compile(func, f"cuda:{arch}")
    assert "clock" not in compiled.source and "samples" not in compiled.source
    built, samples = compiled._sampled(4, 100)
    assert labels <= set(samples.labels)
    assert built.source.count("axe_samples_begin(") == built.source.count("axe_samples_end(") >= 2
    assert all(each.local_bytes == 0 for each in built.resources.values())


@pytest.mark.gpu
@pytest.mark.parametrize("roles", ["specialized", "uniform"])
def test_profile(cuda, roles, tmp_path):
    """Every role of every block is there, its waits lie within its time, and the result is right."""
    if roles == "specialized" and tvm.runtime.device("cuda").compute_version != "9.0":
        pytest.skip("kernels are specialized on Hopper alone")
    option = "" if roles == "specialized" else ', roles="uniform"'
    func = tvm.script.from_source(
        f"""
@T.prim_func
def product(
    A: T.Buffer((1024, 512), "float16"), B: T.Buffer((512, 1024), "float16"), C: T.Buffer((1024, 1024), "float32")
):
    with tile.kernel(8, 8{option}) as (m, n):
        a = tile.shared((128, 64), "float16")
        b = tile.shared((64, 128), "float16")
        c = tile.fragment((128, 128), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(8):
            tile.copy(A[m * 128, k * 64], a)
            tile.copy(B[k * 64, n * 128], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[m * 128, n * 128])
""",
        extra_vars={"tile": tile, "T": T},
    )
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype("float16") for shape in ((1024, 512), (512, 1024)))
    c = np.full((1024, 1024), np.nan, "float32")
    profile = tile.compile(func, "cuda").profile(a, b, c, blocks=4)
    np.testing.assert_array_equal(c, a.astype("float32") @ b.astype("float32"))
    names = {role.name for role in profile.roles}
    assert ("the producer" in names) == (roles == "specialized")
    assert {role.block for role in profile.roles} == set(range(4)) and len(profile.roles) == 4 * len(names)
    for role in profile.roles:
        assert not role.lost and role.waits
        edges = [role.start, *(edge for wait in role.waits for edge in (wait.start, wait.stop)), role.stop]
        assert edges == sorted(edges)
        assert 0 < role.stop - role.start < 10_000_000  # nanoseconds
    loads = [w for r in profile.roles for w in r.waits if w.label in ("a, b to be loaded", "loads of loop k")]
    consumers = [role for role in profile.roles if role.name != "the producer"]
    assert len(loads) == 8 * len(consumers)
    profile.save(tmp_path / "profile.json")
    assert profile.name in str(profile)
