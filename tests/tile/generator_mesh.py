"""Random programs of a mesh: devices that push rows to each other, or pull them, in phases that flags order.

Numbers are int32, so every bit counts. How a phase tells is drawn: a flag for each peer or one that counts, reset or
not, told by an order or by that a kernel has begun; to whom rows go, by a shift or by `me ^ k`, and what is done with
them, too. In some phases rows are added atomically to what peers have; in some the own slot of what peers store to is
read first, as in an exchange in place. In others a loop hands rows on through a few slots, and who takes a row gives
its slot back. Every program is right by construction, so a fault of the interpreter is one of it or of the program's
reading.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import tvm
from interpreter_mesh import interpret_mesh
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.collective import MeshKernel, Workers
from tvm_axe.tile.reading import Reader

POISON = -77
ORDERS = 3
"""Orders in which the interpreter runs a program, besides one block of a device at a time."""

MISTAKES = ("wait", "signal", "peer", "early", "unordered")
"""What a program can be drawn with left out, or done wrong, in its last phase."""


@dataclass
class MeshMade:
    """A program's source, and what each parameter but the device holds: of mesh tensors all slabs, of others a copy
    each."""

    source: str
    devices: int
    arrays: list[np.ndarray]

    @property
    def func(self) -> tirx.PrimFunc:
        return tvm.script.from_source(self.source, extra_vars={"tile": tile, "T": T})


@dataclass
class _MeshMaker:
    rng: random.Random
    devices: int
    mistake: str | None = None
    params: list[str] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def make(self, name: str) -> MeshMade:
        self.rows, self.n = self.rng.choice([1, 2, 3]), self.rng.choice([1, 5, 16])
        self.split = self.rng.choice([1, 2])
        shape = (self.rows * self.split, self.n)
        self.param("x", shape, False, values=True)
        phases = self.rng.choice([1, 2, 3])
        for phase in range(phases):
            mistake = self.mistake if phase == phases - 1 else None
            ways = [self.push, self.hand_on, self.join, self.pull]
            drawn = self.rng.choices(ways, [0.4, 0.3, 0.2, 0 if mistake else 0.2])
            drawn[0](phase, mistake)
        self.param("out", shape, False)
        body = [
            f"part = tile.fragment(({self.split}, {self.n}), 'int32')",
            f"total = tile.fragment(({self.split}, {self.n}), 'int32')",
            f"tile.copy(x[i * {self.split}, 0], total)",
            *self.lines,
            f"tile.copy(total, out[i * {self.split}, 0])",
        ]
        source = "\n".join(
            [
                "@T.prim_func",
                f"def {name}({', '.join(['me: T.int32', *self.params])}):",
                f"    with tile.kernel({self.rows}, device=me) as i:",
                *(f"        {line}" for line in body),
            ]
        )
        return MeshMade(source, self.devices, self.arrays)

    def param(
        self, name: str, shape: tuple[int, ...], of_mesh: bool, values: bool = False, flags: bool = False
    ) -> None:
        whole = (self.devices, *shape)
        kind = f"tile.mesh_tensor({whole}, 'int32')" if of_mesh else f"T.Buffer({shape}, 'int32')"
        self.params.append(f"{name}: {kind}")
        drawn = np.random.default_rng(self.rng.randrange(1 << 30)).integers(-50, 50, whole)
        self.arrays.append((drawn if values else np.full(whole, 0 if flags else POISON)).astype("int32"))

    def meeting(self, shift: int, xor: bool) -> tuple[str, str, str]:
        """To whom a row goes, from whom one comes, and the condition under which the peer is there; "" for always."""
        if not xor:
            return f"(me + {shift}) % {self.devices}", f"(me + {self.devices - shift}) % {self.devices}", ""
        peer = f"(me ^ {shift})"
        return peer, peer, "" if self.devices & (self.devices - 1) == 0 else f"if {peer} < {self.devices}:"

    def put(self, condition: str, lines: list[str]) -> None:
        """Have the lines run where the condition holds."""
        self.lines += [condition, *(f"    {line}" for line in lines)] if condition else lines

    def push(self, phase: int, mistake: str | None) -> None:
        """Store the row to some peers, tell them, and take in what came."""
        n, split, devices = self.n, self.split, self.devices
        shifts = self.rng.sample(range(devices), self.rng.randint(2 if mistake else 1, devices))
        xor = self.rng.random() < 0.3
        meetings = {shift: self.meeting(shift, xor) for shift in shifts}
        counts = self.rng.random() < 0.3 and not any(condition for _, _, condition in meetings.values())
        in_place = self.rng.random() < 0.3  # the own slot has a row from the start
        self.param(f"to{phase}", (devices, self.rows * split, n), True, values=in_place)
        self.param(f"flags{phase}", (1 if counts else devices, self.rows), True, flags=True)
        self.lines += self.taking(f"to{phase}[me, me, i * {split}, 0]") if in_place else []
        slot = "0" if counts else "me"
        left_out = _last_other(shifts) if mistake else None
        for shift, (peer, _, condition) in meetings.items():
            lines = [f"tile.copy(total, to{phase}[{peer}, me, i * {split}, 0])"]
            self.tell(lines, f"flags{phase}", peer, f"{slot}, i", counts, mistake if shift == left_out else None)
            self.put(condition, lines)
        reset = self.rng.random() < 0.5
        if counts and mistake != "wait":
            self.lines.append(f"tile.wait(flags{phase}[me, 0, i], {len(shifts)}, reset={reset})")
        for shift in self.rng.sample(shifts, len(shifts)):
            _, source, condition = meetings[shift]
            lines = self.taking(f"to{phase}[me, {source}, i * {split}, 0]")
            if not counts and not (mistake == "wait" and shift == left_out):
                lines.insert(0, f"tile.wait(flags{phase}[me, {source}, i], reset={reset})")
            self.put(condition, lines)

    def join(self, phase: int, mistake: str | None) -> None:
        """Add the row to what some peers have, in no order, tell them, and take in one's own once all have added."""
        n, split, devices, held = self.n, self.split, self.devices, f"held{phase}"
        shifts = self.rng.sample(range(devices), self.rng.randint(2 if mistake else 1, devices))
        self.param(held, (self.rows * split, n), True, flags=True)
        self.param(f"flags{phase}", (self.rows,), True, flags=True)
        left_out = _last_other(shifts) if mistake else None
        for shift in shifts:
            peer = f"(me + {shift}) % {devices}"
            place = f"i * {split}:i * {split} + {split}, 0:{n}"
            lines = [f"tile.atomic_add(total, {held}[{peer}, {place}])"]
            if self.rng.random() < 0.5:
                added = f"tile.atomic_add(total[r, c], {held}[{peer}, i * {split} + r, c])"
                lines = [f"with tile.parallel({split}, {n}) as (r, c):", f"    {added}"]
            self.tell(lines, f"flags{phase}", peer, "i", True, mistake if shift == left_out else None)
            self.lines += lines
        if mistake != "wait":
            self.lines.append(f"tile.wait(flags{phase}[me, i], {len(shifts)}, reset={self.rng.random() < 0.5})")
        self.lines += self.taking(f"{held}[me, i * {split}, 0]")

    def tell(self, lines: list[str], flags: str, peer: str, place: str, add: bool, mistake: str | None) -> None:
        """Have a peer told what the lines do."""
        told = f"({peer} + 1) % {self.devices}" if mistake == "peer" else peer
        ordered = ", ordered=False" if mistake == "unordered" else ""
        if mistake != "signal":
            lines.insert(
                0 if mistake == "early" else len(lines), f"tile.signal({flags}[{told}, {place}], add={add}{ordered})"
            )

    def hand_on(self, phase: int, mistake: str | None) -> None:
        """Have a loop store rows to a peer through a few slots, each of which the peer gives back once it has read."""
        n, split, devices, t = self.n, self.split, self.devices, f"t{phase}"
        # Two devices that send to each other in turns need nothing given back of two slots.
        slots = 1 if mistake else self.rng.choice([1, 2])
        steps = slots + self.rng.choice([1, 3])
        shift, xor = 1 if mistake else self.rng.randrange(devices), self.rng.random() < 0.4
        peer, source, condition = self.meeting(shift, xor)
        way = self.rng.choice(["turns", "counts", "reset", "given first"])
        counts, place = way == "counts", "0, i" if way == "counts" else f"{t} % {slots}, i"
        turn = f"{t} // {slots} + 1" if way == "turns" else "1"
        full, back = {
            "turns": (turn, f"{t} // {slots}"),
            "counts": (f"{t} + 1", f"{t} - {slots - 1}"),
        }.get(way, ("1, reset=True", "1, reset=True"))
        self.param(f"to{phase}", (slots, self.rows * split, n), True)
        for flags in (f"full{phase}", f"free{phase}"):
            self.param(flags, (1 if counts else slots, self.rows), True, flags=True)

        wait = [f"tile.wait(free{phase}[me, {place}], {back})"]
        if way in ("turns", "reset") or (counts and self.rng.random() < 0.5):
            wait = [f"if {t} >= {slots}:", f"    {wait[0]}"]
        send = [
            *([] if mistake == "wait" else wait),
            f"tile.copy(total, to{phase}[{peer}, {t} % {slots}, i * {split}, 0])",
            f"tile.signal(full{phase}[{peer}, {place}], {turn}, add={counts}, ordered={mistake != 'unordered'})",
        ]
        given = f"({source} + 1) % {devices}" if mistake == "peer" else source
        taking = self.taking(f"to{phase}[me, {t} % {slots}, i * {split}, 0]")
        back_given = (
            [f"tile.signal(free{phase}[{given}, {place}], {turn}, add={counts})"] if mistake != "signal" else []
        )
        receive = [
            f"tile.wait(full{phase}[me, {place}], {full})",
            *(back_given + taking if mistake == "early" else taking + back_given),
        ]
        first = [f"tile.signal(free{phase}[{source}, 0:{slots}, i], ordered={self.rng.random() < 0.5})"]
        first = first if way == "given first" else []

        def loop(*lines: str) -> list[str]:
            return [f"for {t} in range({steps}):", *(f"    {line}" for line in lines)]

        if xor and shift and self.rng.random() < 0.5:  # one of two sends, the other one receives
            halves = loop(*send), [*first, *loop(*receive)]
            lines = [f"if me < {peer}:", *(f"    {line}" for line in halves[0])]
            lines += ["else:", *(f"    {line}" for line in halves[1])]
        else:
            lines = [*first, *loop(*send, *receive)]
        self.put(condition, lines)

    def pull(self, phase: int, mistake: str | None) -> None:
        """Leave the row in the own slab, tell all, and read some peers' rows once they tell."""
        n, split, devices = self.n, self.split, self.devices
        self.param(f"own{phase}", (self.rows * split, n), True)
        self.param(f"flags{phase}", (devices, self.rows), True, flags=True)
        self.lines.append(f"tile.copy(total, own{phase}[me, i * {split}, 0])")
        self.lines.append(f"tile.signal(flags{phase}[0:{devices}, me, i])")
        self.lines.append(f"tile.wait(flags{phase}[me, 0:{devices}, i], reset={self.rng.random() < 0.5})")
        if self.rng.random() < 0.5:
            self.lines.append(f"for d{phase} in range({devices}):")
            self.lines += [f"    {line}" for line in self.taking(f"own{phase}[d{phase}, i * {split}, 0]")]
        else:
            self.lines += self.taking(f"own{phase}[(me + {self.rng.randrange(devices)}) % {devices}, i * {split}, 0]")

    def taking(self, place: str) -> list[str]:
        """What takes in the row at a place."""
        factor, row = (
            self.rng.choice([1, 2, 3, -1]),
            self.rng.choice(["part[r, c]", "part[r, c] + me", "part[r, c] * 2"]),
        )
        return [
            f"tile.copy({place}, part)",
            f"with tile.parallel({self.split}, {self.n}) as (r, c):",
            f"    total[r, c] = T.floormod(total[r, c] * {factor} + {row}, 10007)",
        ]


def _last_other(shifts: list[int]) -> int:
    """The last of the shifts to another device: of its own rows a device needs no word."""
    return [shift for shift in shifts if shift][-1]


def drawn(seed: int, devices: int, mistake: str | None = None) -> MeshMade:
    """The program of a seed."""
    return _MeshMaker(random.Random(seed), devices, mistake).make(f"func{seed}")


def results(made: MeshMade, seed: int, running: int | None, checked: bool = True) -> list[np.ndarray]:
    """What each parameter holds after the interpreter ran it on all devices in one order."""
    program = tile.read(made.func) if checked else Reader(made.func).program()
    return interpret_mesh(program, None, *made.arrays, rng=np.random.default_rng(seed), running=running)


def judge(made: MeshMade, workers: Workers) -> None:
    """Interpret it in several orders, which must agree, then run it by workers and compare every element."""
    want = results(made, 0, 1)
    for seed in range(1, 1 + ORDERS):
        for one, other in zip(results(made, seed, None), want, strict=True):
            np.testing.assert_array_equal(one, other)
    tensors = []
    for array in made.arrays:
        tensors.append(workers.mesh_tensor(array.shape[1:], "int32"))
        for device in range(made.devices):
            tensors[-1].slab(device)[...] = array[device]
    MeshKernel(workers, made.func)(*tensors)
    for number, (tensor, one) in enumerate(zip(tensors, want, strict=True)):
        found = np.stack([tensor.slab(device) for device in range(made.devices)])
        np.testing.assert_array_equal(found, one, err_msg=f"parameter {number} of\n{made.source}")
        workers.free(tensor)
