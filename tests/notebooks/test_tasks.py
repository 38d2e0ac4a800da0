"""Ten tasks of the README, done in one notebook by who has read nothing else: no cell raises what it isn't to raise."""

import ast
import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
INTERRUPTED = "interrupted"
"""The tag of a cell that is interrupted once it has printed something."""
AGAIN = 30.0  # seconds

SETUP = """
import os
import numpy as np
from tvm.script import tirx as T
import tvm_axe as axe

kernel = os.getpid()

@T.prim_func(s_tir=True)
def block(
    A: T.Buffer((32, 64), "float32"),
    W: T.Buffer((64, 48), "float32"),
    bias: T.Buffer((48,), "float32"),
    out: T.Buffer((32, 48), "float32"),
):
    C = T.sblock_alloc_buffer((32, 48), "float32")
    for i, j, k in T.grid(32, 48, 64):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(32, 48):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0))

rng = np.random.default_rng(0)
a, w, bias = (rng.standard_normal(shape, dtype="float32") for shape in [(32, 64), (64, 48), (48,)])
want = np.maximum(a.astype("float64") @ w + bias, 0)

def agrees(result):
    np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4)
"""

TASKS = {
    "a schedule by names": """
sch = axe.Schedule(block, mesh={"tp": 2})
partial, reduce = sch.shard("mm", "k", "tp")
scatter, gather = sch.split_collective(reduce)
(gather,) = sch.reorder_collective(gather, ["epi"])
sch.fuse_collective([scatter, "epi", gather])
sch
""",
    "compile, and call with whole arrays": """
exe = axe.compile(sch, target="llvm")
agrees(exe(a, w, bias))
agrees(exe(a, bias=bias, W=w))
exe
""",
    "show a layout": """
layout = exe.layouts["out"]
picture = layout.show((32, 48), exe.mesh)
assert str(layout) in picture.text()
print(layout)
picture
""",
    "check": """
report = axe.check(sch)
assert report.ok
report
""",
    "wrong arrays and names": """
def refused(call, *words):
    try:
        call()
    except axe.AxeError as error:
        assert all(word in str(error) for word in words), str(error)
        print(error)
    else:
        raise AssertionError("it wasn't refused")

refused(lambda: exe(a, w.T, bias.astype("float64")), "W", "(64, 48)", "bias", "float32")
refused(lambda: exe(a, w), "bias")
refused(lambda: exe(a, w, bias=bias, V=w), "V")
refused(lambda: exe([[1.0]], w, bias), "A")
refused(lambda: sch.shard("mmm", "k", "tp"), "mmm", "mm, ")
refused(lambda: sch.shard("mm", "q", "tp"), "q", "j")
refused(lambda: axe.Schedule(block, mesh={"tp": 2}).shard("mm", "k", "dp"), "dp", "tp")
refused(lambda: axe.Schedule("block", mesh={"tp": 2}), "str")
refused(lambda: axe.compile("block"), "str")
refused(lambda: axe.compile(block, target="llvmx"), "llvmx")
refused(lambda: axe.search(block), "mesh")
refused(lambda: axe.search("block", {"tp": 2}), "str")
refused(lambda: axe.tune(block, trials=-1), "trials")
agrees(exe(a, w, bias))
""",
    "close, and call again": """
exe.close()
agrees(exe(a, w, bias))
with exe:
    agrees(exe(a, w, bias))
agrees(exe(a, w, bias))
""",
    "time and show": """
seconds = exe.time(a, w, bias, repeat=5)
assert len(seconds) == 5 and min(seconds) > 0
assert "mesh kernel over tp" in exe.show()
print(exe.show())
""",
    "search": """
found = axe.search(block, {"tp": 2}, work_dir="search", measure=2, repeat=2)
assert found.best.median_ms > 0
with axe.compile(found.best.sch) as best:
    agrees(best(a, w, bias))
found
""",
    "Ctrl-C": """
print("begins", flush=True)
exe.time(a, w, bias, repeat=10**7)
""",
    "go on after Ctrl-C": """
agrees(exe(a, w, bias))
""",
    "tune a little": """
result = axe.tune(exe.module, target=exe.target, trials=2, work_dir="tuning")
assert os.path.exists(result.report)
agrees(axe.compile(sch, work_dir="tuning")(a, w, bias))
result
""",
    "a tile program": """
from tvm_axe import tile

@T.prim_func
def product(A: T.Buffer((32, 64), "float32"), B: T.Buffer((64, 48), "float32"), C: T.Buffer((32, 48), "float32")):
    with tile.kernel(tile.cdiv(32, 16), tile.cdiv(48, 16)) as (m, n):
        x = tile.shared((16, 32), "float32")
        y = tile.shared((32, 16), "float32")
        c = tile.fragment((16, 16), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(tile.cdiv(64, 32)):
            tile.copy(A[m * 16, k * 32], x)
            tile.copy(B[k * 32, n * 16], y)
            tile.gemm(x, y, c)
        tile.copy(c, C[m * 16, n * 16])

kernel_of_tiles = tile.compile(product, "llvm")
c = np.empty((32, 48), "float32")
kernel_of_tiles(a, w, c)
np.testing.assert_allclose(c, a.astype("float64") @ w, rtol=1e-4, atol=1e-4)
refused(lambda: kernel_of_tiles(a, w), "C")
refused(lambda: kernel_of_tiles(a, w.T, c), "B")
refused(lambda: tile.compile("product"), "str")
kernel_of_tiles
""",
    "simulate streams": """
from tvm_axe.stream import Accelerator, StreamProgram, Selector, StreamType, functions

p = StreamProgram("two experts")
tokens = p.load(p.tensor("x", 16, 32), (1, 32)).flatten()
for expert, part in enumerate(tokens.partition(p.input("route", StreamType((16,), Selector(2))))):
    rows = part.reshape(None).accum(functions.retile())
    weights = rows.load(p.tensor(f"w{expert}", 32, 8), (32, 8)).flatten(0, 2)
    rows.map(functions.matmul(), weights).store(p.tensor(f"y{expert}", 16, 8))
route = [(0,), (0, 1), (1,), (0,)] * 4
run = p.run({"route": route}, Accelerator(), values=False)
assert run.cycles > 0
refused(lambda: p.run({}, Accelerator(), values=False), "route")
run
""",
    "the same kernel all along": """
assert os.getpid() == kernel
""",
}
"""What is done, a cell each, in this order."""


class Notebook(NotebookClient):
    """A client that interrupts the cells with a tag."""

    interrupting: asyncio.Task | None = None

    async def begin(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        if INTERRUPTED in cell.metadata.get("tags", []):
            self.interrupting = asyncio.create_task(self.interrupt(cell))

    async def interrupt(self, cell: nbformat.NotebookNode) -> None:
        while not cell.outputs:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        while True:
            await self.km.interrupt_kernel()
            await asyncio.sleep(AGAIN)

    async def end(self, cell: nbformat.NotebookNode, cell_index: int, execute_reply: dict) -> None:
        if self.interrupting is not None:
            self.interrupting.cancel()
            self.interrupting = None


@pytest.fixture(scope="module")
def done(
    folder: Path, environment: dict[str, str], managed: Callable[..., AsyncKernelManager]
) -> Iterator[dict[str, nbformat.NotebookNode]]:
    """The cells by task, after one run of the notebook."""
    cells = {name: new_code_cell(code.strip()) for name, code in {"": SETUP, **TASKS}.items()}
    cells["Ctrl-C"].metadata["tags"] = [INTERRUPTED]
    notebook = new_notebook(cells=list(cells.values()))
    client = Notebook(notebook, km=managed(AsyncKernelManager), timeout=300, allow_errors=True)
    client.on_cell_start, client.on_cell_executed = client.begin, client.end
    client.execute(env=environment, cwd=str(folder))
    nbformat.validate(notebook)
    errors = [output for output in cells[""].outputs if output.output_type == "error"]
    assert not errors, "\n".join(errors[0].traceback)
    return cells


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_done(done, task):
    errors = [output for output in done[task].outputs if output.output_type == "error"]
    if task == "Ctrl-C":
        assert [error.ename for error in errors] == ["KeyboardInterrupt"]
    else:
        assert not errors, re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(errors[0].traceback))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("a schedule by names", "MM-fuse(RS-C-AG)"),
        ("compile, and call with whole arrays", "mesh kernel over tp"),
        ("show a layout", "data:image/svg+xml"),
        ("check", "right on"),
        ("search", "median ms"),
        ("tune a little", "untuned ms"),
        ("a tile program", "operations"),
        ("simulate streams", "cycles"),
    ],
)
def test_what_a_cell_ends_with_is_shown(done, task, words):
    (shown,) = [output for output in done[task].outputs if output.output_type == "execute_result"]
    assert "<pre" in shown.data["text/html"] and words in shown.data["text/html"]


def test_the_tasks_need_no_more_than_the_readme_says():
    """Every attribute and every name of an argument in the cells is written there."""
    theirs = {"np", "T", "os", "a", "w", "bias", "W", "V", "flush"}
    used = set()
    for code in TASKS.values():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Attribute):
                root = node
                while isinstance(root, ast.Attribute | ast.Call):
                    root = root.value if isinstance(root, ast.Attribute) else root.func
                if not (isinstance(root, ast.Name) and root.id in theirs):
                    used.add(node.attr)
            elif isinstance(node, ast.keyword):
                used |= {node.arg} - theirs
    assert len(used) > 40
    unsaid = sorted(name for name in used if not re.search(rf"\.{name}\b|\b{name}=", README))
    assert not unsaid
