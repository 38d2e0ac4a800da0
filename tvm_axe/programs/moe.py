"""A mixture of experts, shared over expert-parallel devices: dispatch, the experts, combine, an all-to-all each way.

Dimension 0 of tokens counts the devices. Each device puts its tokens into slots by expert, *capacity* of them for each;
the slots go to the devices that have the experts, and what those compute comes back to be weighted and added up. Were
all slots gathered everywhere instead, each device would move as many times the bytes as there are devices. Who goes
where is data: `route` makes the tables out of each token's chosen experts.
"""

from __future__ import annotations

import numpy as np
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import Recipe
from tvm_axe.schedule import Schedule, with_layouts

__all__ = ["MOE", "route"]

# Tokens a device, model width, expert width, experts, slots a device has for each expert, experts a token.
_EXTENTS = {"test": (6, 8, 10, 12, 2, 2), "uneven": (5, 3, 7, 7, 2, 2), "bench": (1024, 512, 1024, 8, 256, 2)}


def route(expert: np.ndarray, experts: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Give each token a slot with each of its experts, in the order of the tokens, while there are any.

    Parameters
    ----------
    expert : numpy.ndarray
        [devices, tokens, choices], int32: the experts that each token chose.
    experts : int
        How many there are.
    capacity : int
        The slots that a device has for each.

    Returns
    -------
    index : numpy.ndarray
        [devices, experts, capacity], int32: the token in each slot, -1 for none.
    slot : numpy.ndarray
        The token's slot with each expert, -1 if none was left; of the shape of `expert`, int32.
    """
    devices, _, choices = expert.shape
    index = np.full((devices, experts, capacity), -1, "int32")
    slot = np.full(expert.shape, -1, "int32")
    for device in range(devices):
        for e in range(experts):
            wanted = np.flatnonzero(expert[device].reshape(-1) == e)[:capacity]
            index[device, e, : len(wanted)] = wanted // choices
            slot[device].reshape(-1)[wanted] = np.arange(len(wanted))
    return index, slot


def moe(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program Y[s, t] = sum of gate * relu(X[s, t] W1[e]) W2[e] over the experts e with a slot for t."""
    n = mesh["ep"]
    tokens, hidden, inner, experts, capacity, choices = _EXTENTS[size]

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((n, tokens, hidden), "float32"),
        index: T.Buffer((n, experts, capacity), "int32"),
        W1: T.Buffer((experts, hidden, inner), "float32"),
        W2: T.Buffer((experts, inner, hidden), "float32"),
        gate: T.Buffer((n, tokens, choices), "float32"),
        expert: T.Buffer((n, tokens, choices), "int32"),
        slot: T.Buffer((n, tokens, choices), "int32"),
        Y: T.Buffer((n, tokens, hidden), "float32"),
    ) -> None:
        D = T.sblock_alloc_buffer((n, experts, capacity, hidden), "float32")
        H = T.sblock_alloc_buffer((n, experts, capacity, inner), "float32")
        R = T.sblock_alloc_buffer((n, experts, capacity, inner), "float32")
        O = T.sblock_alloc_buffer((n, experts, capacity, hidden), "float32")
        for s, e, c, h in T.grid(n, experts, capacity, hidden):
            with T.sblock("dispatch"):
                vs, ve, vc, vh = T.axis.remap("SSSS", [s, e, c, h])
                D[vs, ve, vc, vh] = T.if_then_else(
                    index[vs, ve, vc] >= 0, X[vs, T.max(index[vs, ve, vc], 0), vh], T.float32(0)
                )
        for e, s, c, h, f in T.grid(experts, n, capacity, hidden, inner):
            with T.sblock("up"):
                ve, vs, vc, vh, vf = T.axis.remap("SSSRS", [e, s, c, h, f])
                with T.init():
                    H[vs, ve, vc, vf] = T.float32(0)
                H[vs, ve, vc, vf] = H[vs, ve, vc, vf] + D[vs, ve, vc, vh] * W1[ve, vh, vf]
        for e, s, c, f in T.grid(experts, n, capacity, inner):
            with T.sblock("relu"):
                ve, vs, vc, vf = T.axis.remap("SSSS", [e, s, c, f])
                R[vs, ve, vc, vf] = T.max(H[vs, ve, vc, vf], T.float32(0))
        for e, s, c, f, h in T.grid(experts, n, capacity, inner, hidden):
            with T.sblock("down"):
                ve, vs, vc, vf, vh = T.axis.remap("SSSRS", [e, s, c, f, h])
                with T.init():
                    O[vs, ve, vc, vh] = T.float32(0)
                O[vs, ve, vc, vh] = O[vs, ve, vc, vh] + R[vs, ve, vc, vf] * W2[ve, vf, vh]
        for s, t, k, h in T.grid(n, tokens, choices, hidden):
            with T.sblock("combine"):
                vs, vt, vk, vh = T.axis.remap("SSRS", [s, t, k, h])
                with T.init():
                    Y[vs, vt, vh] = T.float32(0)
                Y[vs, vt, vh] = Y[vs, vt, vh] + T.if_then_else(
                    slot[vs, vt, vk] >= 0,
                    gate[vs, vt, vk] * O[vs, expert[vs, vt, vk], T.max(slot[vs, vt, vk], 0), vh],
                    T.float32(0),
                )

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        expert = np.argsort(rng.random((n, tokens, experts)), axis=2)[..., :choices].astype("int32")
        index, slot = route(expert, experts, capacity)
        gate = rng.dirichlet(np.ones(choices), (n, tokens)).astype("float32")
        w1 = normal(rng, experts, hidden, inner, scale=hidden**-0.5)
        w2 = normal(rng, experts, inner, hidden, scale=inner**-0.5)
        return normal(rng, n, tokens, hidden), index, w1, w2, gate, expert, slot

    def compute(
        x: np.ndarray,
        index: np.ndarray,
        w1: np.ndarray,
        w2: np.ndarray,
        gate: np.ndarray,
        expert: np.ndarray,
        slot: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        y = np.zeros_like(x)
        for e in range(experts):
            device, token, choice = np.nonzero((expert == e) & (slot >= 0))
            y[device, token] += gate[device, token, choice, None] * (np.maximum(x[device, token] @ w1[e], 0) @ w2[e])
        return (y,)

    def share(sch: Schedule) -> tuple[SBlockRV, SBlockRV]:
        """Share tokens and experts over their devices; return the blocks that read what lies elsewhere."""
        blocks = [sch.get_sblock(name) for name in ("dispatch", "up", "relu", "down", "combine")]
        for block in blocks:
            sch.shard(sch.get_loops(block)[0], "ep")
        return blocks[1], blocks[-1]

    def ag_mm_ag(sch: Schedule) -> None:
        up, combine = share(sch)
        sch.redistribute(up, "D", "ep")
        sch.redistribute(combine, "O", "ep")

    def a2a_mm_a2a(sch: Schedule) -> None:
        up, combine = share(sch)
        sch.redistribute(up, "D", "ep", 1)
        sch.redistribute(combine, "O", "ep", 0)

    schedules: dict[str, Recipe] = {"AG-MM-AG": ag_mm_ag, "A2A-MM-A2A": a2a_mm_a2a}
    slots = Rows(experts, capacity * hidden, "float32", n)  # those of a device
    moved = {
        "AG-MM-AG": (n - 1) * slots.whole + n * slots.all_gathered,
        "A2A-MM-A2A": slots.reduce_scattered + slots.all_gathered,
    }
    func = with_layouts(kernel, {"Y": Layout.sharded((n, tokens, hidden), mesh, {0: "ep"})})
    return DistributedProgram(
        name="moe",
        func=func,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="ep",
        reduced=((n, tokens, hidden), "float32"),
    )


MOE = ProgramFactory(("ep",), moe)
