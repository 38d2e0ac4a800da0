"""Random work behind a sum over devices, in the kernel in which they meet, beside the unscheduled function.

CPU workers run it, as the interpreter's numbers are float64 whatever a program's are. Contents are small integers, of
int32 and int64 large ones, too, and of float64 a part that float32 doesn't hold, so that nothing depends on an order,
and results are equal.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import MeshKernel
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.derive import derive_steps
from tvm_axe.lower.infer import infer_shardings
from tvm_axe.lower.parsing import parse_program
from tvm_axe.lower.rows import Meeting, meeting_of
from tvm_axe.machines import resolve_target
from tvm_axe.schedule import Schedule, layouts_of, with_layouts

HOPPER = resolve_target("cuda:sm_90a")
PAGE = 2 << 20
FAMILIES = (("int8", "int32", "int64"), ("float16", "bfloat16", "float32"), ("float64",))
"""A program's types: what a float becomes as an integer, or float64 in a sum of float32, depends on its last bits."""


class Drawn:
    """A program's text: the sum of X over devices, and one to five blocks behind it, each an element or a number a row.

    Parameters are what `inputs` and `outputs` name, with shapes and types.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.types = FAMILIES[rng.integers(len(FAMILIES))]
        self.devices, self.rows, self.columns = (int(rng.choice(of)) for of in ((2, 3), (1, 2, 5, 48), (1, 7, 32, 70)))
        self.matrix, self.row = (self.rows, self.columns), (self.rows,)
        terms = self.drawn(*self.types)
        self.total = "float32" if terms in ("float16", "bfloat16") and rng.random() < 0.5 else terms
        self.inputs = {"X": ((self.devices, *self.matrix), terms)}
        self.made = {"total": (self.matrix, self.total)}
        nests = [self.block("SSR", "total", "0", f"total[vi, vj] + {self.cast('X[vk, vi, vj]', terms, self.total)}")]
        for n in range(int(rng.integers(1, 6))):
            nests.append(self.nest(f"made_{n}"))
        self.blocks = [name for name in self.made if name != "total"]
        self.outputs = {n: self.made[n] for n in self.blocks if n == self.blocks[-1] or rng.random() < 0.4}
        params = "".join(f"    {name}: T.Buffer({shape}, {dtype!r}),\n" for name, (shape, dtype) in self.tensors())
        held = "".join(
            f"    {name} = T.sblock_alloc_buffer({shape}, {dtype!r})\n"
            for name, (shape, dtype) in self.made.items()
            if name not in self.outputs
        )
        self.text = f"@T.prim_func(s_tir=True)\ndef kernel(\n{params}) -> None:\n{held}{''.join(nests)}"
        self.func: tirx.PrimFunc = tvm.script.from_source(self.text, {"T": T})

    def tensors(self) -> list[tuple[str, tuple[tuple[int, ...], str]]]:
        return [*self.inputs.items(), *self.outputs.items()]

    def drawn(self, *choices: str) -> str:
        return str(self.rng.choice(choices))

    def nest(self, name: str) -> str:
        """A block that makes an element of the row, or a number of it."""
        sums = ["sum"] if "float32" in self.types else []
        numbers = ["number"] if any(shape == self.row for shape, _ in self.made.values()) else []
        kind = self.drawn("element", "element", "max", "min", *sums, *numbers)
        dtype = "float32" if kind == "sum" else self.drawn(*self.types)
        value = self.value(dtype, kind != "number")
        self.made[name] = self.matrix if kind == "element" else self.row, dtype
        if kind in ("element", "number"):
            return self.block("SS"[: len(self.made[name][0])], name, "", value)
        if kind == "sum":
            return self.block("SR", name, "0", f"{name}[vi] + ({value})")
        return self.block("SR", name, self.drawn("-2", "0", "1"), f"T.{kind}({name}[vi], {value})")

    def block(self, kinds: str, name: str, start: str, value: str) -> str:
        extents, names = (self.rows, self.columns, self.devices), "ijk"
        loops, iterators = (", ".join(prefix + n for n in names[: len(kinds)]) for prefix in ("", "v"))
        at = "vi, vj" if len(self.made[name][0]) == 2 else "vi"
        bound = f"T.axis.remap({kinds!r}, [{loops}])"
        init = f"            with T.init():\n                {name}[{at}] = T.{self.made[name][1]}({start})\n"
        return (
            f"    for {loops} in T.grid({', '.join(map(str, extents[: len(kinds)]))}):\n"
            f"        with T.sblock({name!r}):\n"
            f"            {iterators} = {bound}\n{init * bool(start)}            {name}[{at}] = {value}\n"
        )

    def value(self, dtype: str, whole: bool) -> str:
        """What is made of values at a place of the matrix, if `whole`, or else of a row's numbers; one is of before."""
        form = self.drawn("{} + {}", "{} - {}", "T.max({}, {})", "T.min({}, {})", "{} + {} - {}")
        kinds = ("made", *(self.drawn("number", "made", "made", *["matrix", "vector"] * whole) for _ in range(2)))
        return form.format(*(self.operand(kind, dtype, whole) for kind in kinds))

    def operand(self, kind: str, dtype: str, whole: bool) -> str:
        there = [name for name, (shape, _) in self.made.items() if whole or shape == self.row]
        if kind == "number":
            return f"T.{dtype}({self.rng.integers(1, 4)})"
        if kind == "made":
            name = self.drawn(*there)
            shape, of = self.made[name]
            return self.cast(f"{name}[{'vi, vj' if shape == self.matrix else 'vi'}]", of, dtype)
        name, of = f"given_{len(self.inputs)}", self.drawn(*self.types)
        self.inputs[name] = self.matrix if kind == "matrix" else (self.columns,), of
        return self.cast(f"{name}[{'vi, vj' if kind == 'matrix' else 'vj'}]", of, dtype)

    @staticmethod
    def cast(value: str, of: str, to: str) -> str:
        return value if of == to else f"T.Cast({to!r}, {value})"

    def arrays(self) -> dict[str, np.ndarray]:
        """Contents of the inputs."""
        found = {}
        for name, (shape, dtype) in self.inputs.items():
            array = self.rng.integers(-2, 3, shape).astype("float64" if dtype == "float64" else "int64")
            large = {"int32": 2**27, "int64": 2**50, "float64": 2.0**-40}.get(dtype, 0)
            found[name] = (array + large * self.rng.integers(-2, 3, shape)).astype(check_dtype(dtype))
        return found

    def meeting(self) -> Meeting | str | None:
        """The kernel of a GPU for it all, or why there is none."""
        mesh = Mesh({"tp": self.devices})
        layouts = {"X": Layout.sharded((self.devices, *self.matrix), mesh, {0: "tp"})}
        sch = Schedule(with_layouts(self.func, layouts), mesh=mesh)
        sch.all_reduce(sch.get_loops(sch.get_sblock("total"))[2], "tp")
        sch.fuse_collective([sch.get_sblock(name) for name in ("total", *self.blocks)])
        func = sch.mod["main"]
        program = parse_program(func, mesh, PAGE)
        shardings = infer_shardings(program, layouts_of(func))
        (step,) = derive_steps(program, shardings)
        return meeting_of(program, step, shardings, frozenset(program.intermediates), HOPPER)

    def unscheduled(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        tensors = {name: tvm.runtime.tensor(array) for name, array in arrays.items()}
        for name, (shape, dtype) in self.outputs.items():
            tensors[name] = tvm.runtime.empty(shape, dtype)
        tvm.compile(tvm.IRModule.from_expr(self.func), target="llvm")["kernel"](*tensors.values())
        return {name: tensors[name].numpy() for name in self.outputs}

    def by_workers(self, found: Meeting, arrays: dict[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
        """What each device has of each output, poisoned before, and that the flags are zero again."""
        with axe.launch(Mesh({"tp": self.devices}), engine="threads") as workers:
            tensors = []
            for buffer, _ in found.kernel.arguments:
                slab = tuple(int(extent) for extent in buffer.shape)
                given = arrays.get(str(buffer.name))
                tensors.append(workers.mesh_tensor(slab[1:] if str(buffer.name) == "X" else slab, str(buffer.dtype)))
                for device in range(self.devices):
                    whole = given if given is None or str(buffer.name) != "X" else given[device]
                    if whole is not None:
                        tensors[-1].slab(device)[...] = whole
                    elif not buffer.name.endswith("_flags"):
                        tensors[-1].slab(device)[...] = 99
            MeshKernel(workers, found.program)(*tensors)
            by_name = {str(buffer.name): each for (buffer, _), each in zip(found.kernel.arguments, tensors)}
            assert not any(by_name["X_flags"].slab(device).any() for device in range(self.devices))
            return {
                name: [by_name[name].slab(device).copy() for device in range(self.devices)] for name in self.outputs
            }


@pytest.mark.parametrize("seed", range(12))
def test_results_are_equal(seed: int) -> None:
    made = Drawn(seed)
    found = made.meeting()
    assert isinstance(found, Meeting), f"{found}\n{made.text}"
    arrays = made.arrays()
    wanted = made.unscheduled(arrays)
    for name, slabs in made.by_workers(found, arrays).items():
        for slab in slabs:
            np.testing.assert_array_equal(slab, wanted[name], f"{name}\n{made.text}")
