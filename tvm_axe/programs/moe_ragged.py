"""A mixture of experts without capacity: tokens go to their experts in ranges of rows, as many as there are.

Dimension 0 of tokens counts the devices, and dimension 0 of weights the devices that share the experts. Each device has
a list of rows, those of one expert behind each other, and for each row of which device's which token it is: so it reads
from its peers the tokens that chose its experts and no others, whoever has how many, computes each range with its
expert's weights, and the tokens' devices read back what they want. What is moved is what the routing says; no token is
dropped as long as a device's list has room, and none at all where it has room for everybody's. `ranges` makes the
tables out of each token's chosen experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import Recipe
from tvm_axe.schedule import BIND, Schedule, with_layouts

__all__ = ["MOE_RAGGED", "Extents", "Ranges", "moe_ragged", "ranges"]


class Extents(NamedTuple):
    """Tokens and experts of a device, the widths of the model and of an expert, and experts a token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    choices: int


_EXTENTS = {"test": Extents(6, 8, 10, 3, 2), "uneven": Extents(5, 3, 7, 2, 2), "bench": Extents(256, 512, 1024, 4, 2)}


class Ranges(NamedTuple):
    """Who computes what, as tables of int32.

    Attributes
    ----------
    device, token : numpy.ndarray
        [devices, rows]: of which device's which token a row is; -1 and 0 if it is nobody's.
    local : numpy.ndarray
        [devices, rows]: which of its device's experts a row is for; -1 if it is nobody's.
    owner, row : numpy.ndarray
        [devices, tokens, choices]: which device has the row of a token's choice, and which row; -1 and 0 if none has.
    """

    device: np.ndarray
    token: np.ndarray
    local: np.ndarray
    owner: np.ndarray
    row: np.ndarray


def ranges(expert: np.ndarray, experts: int, rows: int) -> Ranges:
    """Give each choice of a token a row with its expert's device, while there are any.

    Parameters
    ----------
    expert : numpy.ndarray
        [devices, tokens, choices], int32: the experts that each token chose; device d has those from d * experts on.
    experts : int
        How many a device has.
    rows : int
        How long a device's list is.
    """
    devices = len(expert)
    device, token, local = (np.full((devices, rows), value, "int32") for value in (-1, 0, -1))
    owner, row = np.full(expert.shape, -1, "int32"), np.zeros(expert.shape, "int32")
    for d in range(devices):
        # By expert, then by device and token: each expert's rows are one range, of any length.
        chosen = np.argwhere((expert >= d * experts) & (expert < (d + 1) * experts))
        chosen = chosen[np.argsort(expert[tuple(chosen.T)], kind="stable")][:rows]
        at = tuple(chosen.T)
        count = len(chosen)
        device[d, :count], token[d, :count], local[d, :count] = at[0], at[1], expert[at] - d * experts
        owner[at], row[at] = d, np.arange(count)
    return Ranges(device, token, local, owner, row)


def moe_ragged(mesh: Mesh, size: str | Extents, dtype: str = "float32") -> DistributedProgram:
    """Return the program Y[s, t] = sum of gate * relu(X[s, t] W1[e]) W2[e] over the experts e that t chose.

    X, the weights and what goes between devices are of `dtype`; the gates and Y are float32.
    """
    n = mesh["ep"]
    tokens, hidden, inner, experts, choices = _EXTENTS[size] if isinstance(size, str) else size
    rows = n * tokens * choices  # room for all tokens at one device
    zero = tirx.const(0, dtype)

    def wide(value: tirx.Expr) -> tirx.Expr:
        return value if dtype == "float32" else T.cast(value, "float32")

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((n, tokens, hidden), dtype),
        W1: T.Buffer((n, experts, hidden, inner), dtype),
        W2: T.Buffer((n, experts, inner, hidden), dtype),
        gate: T.Buffer((n, tokens, choices), "float32"),
        device: T.Buffer((n, rows), "int32"),
        token: T.Buffer((n, rows), "int32"),
        local: T.Buffer((n, rows), "int32"),
        owner: T.Buffer((n, tokens, choices), "int32"),
        row: T.Buffer((n, tokens, choices), "int32"),
        Y: T.Buffer((n, tokens, hidden), "float32"),
    ) -> None:
        D = T.sblock_alloc_buffer((n, rows, hidden), dtype)
        H = T.sblock_alloc_buffer((n, rows, inner), dtype)
        R = T.sblock_alloc_buffer((n, rows, inner), dtype)
        O = T.sblock_alloc_buffer((n, rows, hidden), dtype)
        for d, r, s, h in T.grid(n, rows, n, hidden):
            with T.sblock("dispatch"):
                vd, vr, vs, vh = T.axis.remap("SSRS", [d, r, s, h])
                with T.init():
                    D[vd, vr, vh] = zero
                D[vd, vr, vh] = D[vd, vr, vh] + T.if_then_else(device[vd, vr] == vs, X[vs, token[vd, vr], vh], zero)
        for d, r, h, f in T.grid(n, rows, hidden, inner):
            with T.sblock("up"):
                vd, vr, vh, vf = T.axis.remap("SSRS", [d, r, h, f])
                with T.init():
                    H[vd, vr, vf] = zero
                H[vd, vr, vf] = H[vd, vr, vf] + T.if_then_else(
                    local[vd, vr] >= 0, D[vd, vr, vh] * W1[vd, T.max(local[vd, vr], 0), vh, vf], zero
                )
        for d, r, f in T.grid(n, rows, inner):
            with T.sblock("relu"):
                vd, vr, vf = T.axis.remap("SSS", [d, r, f])
                R[vd, vr, vf] = T.max(H[vd, vr, vf], zero)
        for d, r, f, h in T.grid(n, rows, inner, hidden):
            with T.sblock("down"):
                vd, vr, vf, vh = T.axis.remap("SSRS", [d, r, f, h])
                with T.init():
                    O[vd, vr, vh] = zero
                O[vd, vr, vh] = O[vd, vr, vh] + T.if_then_else(
                    local[vd, vr] >= 0, R[vd, vr, vf] * W2[vd, T.max(local[vd, vr], 0), vf, vh], zero
                )
        for s, t, k, d, h in T.grid(n, tokens, choices, n, hidden):
            with T.sblock("combine"):
                vs, vt, vk, vd, vh = T.axis.remap("SSRRS", [s, t, k, d, h])
                with T.init():
                    Y[vs, vt, vh] = T.float32(0)
                Y[vs, vt, vh] = Y[vs, vt, vh] + T.if_then_else(
                    owner[vs, vt, vk] == vd, gate[vs, vt, vk] * wide(O[vd, row[vs, vt, vk], vh]), T.float32(0)
                )

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        expert = np.argsort(rng.random((n, tokens, n * experts)), axis=2)[..., :choices].astype("int32")
        gate = rng.dirichlet(np.ones(choices), (n, tokens)).astype("float32")
        w1 = normal(rng, n, experts, hidden, inner, scale=hidden**-0.5)
        w2 = normal(rng, n, experts, inner, hidden, scale=inner**-0.5)
        x = normal(rng, n, tokens, hidden)
        return *(array.astype(dtype) for array in (x, w1, w2)), gate, *ranges(expert, experts, rows)

    def compute(
        x: np.ndarray, w1: np.ndarray, w2: np.ndarray, gate: np.ndarray, *tables: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        told = Ranges(*tables)
        made = np.zeros((n, rows, hidden), gate.dtype)
        for d, e in np.ndindex(n, experts):
            own = np.flatnonzero(told.local[d] == e)
            made[d, own] = np.maximum(x[told.device[d, own], told.token[d, own]] @ w1[d, e], 0) @ w2[d, e]
        y = np.zeros(x.shape, gate.dtype)
        for k in range(choices):
            s, t = np.nonzero(told.owner[..., k] >= 0)
            y[s, t] += gate[s, t, k, None] * made[told.owner[s, t, k], told.row[s, t, k]]
        return (y,)

    def share(sch: Schedule) -> None:
        for name in ("dispatch", "up", "relu", "down", "combine"):
            sch.shard(sch.get_loops(sch.get_sblock(name))[0], "ep")

    def gathered(sch: Schedule) -> None:
        share(sch)
        for name, buffer in (("dispatch", "X"), ("combine", "O")):
            sch.redistribute(sch.get_sblock(name), buffer, "ep")

    def pulled(sch: Schedule) -> None:
        share(sch)
        # all_reduce is for sums of what every device has; here a condition picks one of them, and reads that one alone.
        for name, peer in (("dispatch", 3), ("combine", 4)):
            sch.annotate(sch.get_loops(sch.get_sblock(name))[peer], BIND, "ep")

    def finished(sch: Schedule) -> None:
        """The product keeps what is computed of its elements: for GPUs, whose kernel of it takes an epilogue."""
        pulled(sch)
        up = sch.get_sblock("up")
        *_, r, h, f = sch.get_loops(up)
        sch.reorder(r, f, h)
        sch.reverse_compute_at(sch.get_sblock("relu"), f)

    schedules: dict[str, Recipe] = {"AG-MM-AG": gathered, "A2A-MM-A2A": pulled, "A2A-fuse(MM-C)-MM-A2A": finished}
    rows_of_tokens, rows_of_lists = Rows(n, tokens * hidden, dtype, n), Rows(n, rows * hidden, dtype, n)
    wanted = Rows(rows + tokens * choices, hidden, dtype, 1)
    moved = {
        "AG-MM-AG": rows_of_tokens.all_gathered + rows_of_lists.all_gathered,
        # At most: each row of each peer, of which one is read.
        **dict.fromkeys(("A2A-MM-A2A", "A2A-fuse(MM-C)-MM-A2A"), (n - 1) * wanted.whole),
    }
    shared = {
        name: Layout.sharded(shape, mesh, {0: "ep"})
        for name, shape in (
            ("X", (n, tokens, hidden)), ("W1", (n, experts, hidden, inner)), ("W2", (n, experts, inner, hidden)),
            ("Y", (n, tokens, hidden)),
        )
    }  # fmt: skip
    return DistributedProgram(
        name="moe_ragged",
        func=with_layouts(kernel, shared),
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="ep",
        reduced=((n, tokens, hidden), "float32"),
        tolerance=1e-5 if dtype == "float32" else 2e-2,
    )


MOE_RAGGED = ProgramFactory(("ep",), moe_ragged)
