"""A run's state in arrays, which the compiled machine works on: see `tvm_axe.stream.machine`."""

from __future__ import annotations

import array as arrays
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvm_axe import _tvm
from tvm_axe.stream import machine as m
from tvm_axe.stream import steps

if TYPE_CHECKING:
    from tvm_axe.stream.engine import Channel, Engine, Unit


class Clocks:
    """The clocks of a run's units and channels, and of off-chip memory.

    Attributes
    ----------
    late : Unit or None
        A unit that has gone on for longer than it may.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        units, channels, accelerator, wiring = engine.units, engine.channels, engine.accelerator, engine.wiring
        self._units = np.zeros((len(units), 14), np.int64)
        self._units[:, m.AT] = self._units[:, m.TAIL] = np.arange(len(units)) + 1
        self._units[:, m.DUE], self._units[:, m.TURN] = m.NEVER, -1
        self._units[:, m.PORTS] = wiring.first_ports
        depths = np.array([channel.depth for channel in channels], np.int64)
        self._channels = np.zeros((len(channels), 9), np.int64)
        self._channels[:, m.BASE] = np.cumsum(depths) - depths
        self._channels[:, m.DEPTH] = depths
        self._channels[:, m.COUNT] = wiring.filled
        self._channels[:, m.SPACE] = depths - self._channels[:, m.COUNT]
        self._channels[:, m.WAITER] = -1
        self._state = np.zeros(18, np.int64)
        self._state[m.LIMIT] = m.NEVER if engine.max_cycles is None else engine.max_cycles
        self._state[m.TRACED], self._state[m.LATE] = engine.traced, -1
        self._memory = np.zeros(3, np.float64)
        if accelerator is not None:
            memory = accelerator.off_chip
            self._state[m.HOP], self._state[m.ISSUE] = accelerator.hop, memory.issue
            self._state[m.LATENCY] = memory.latency + 3 * accelerator.hop
            self._memory[m.RATE] = memory.rate
        self._queues = np.zeros((len(units), 7), np.int64)
        self._used = len(units) + 1  # cells: none at 0, and an end for each unit
        self._follow, self._tidy = m.machine()
        self._arrays = {
            "code": np.zeros(4 * self._used, np.int64),
            "units": self._units,
            "ports": wiring.ports,
            "channels": self._channels,
            "slots": np.zeros((int(depths.sum()), 2), np.int64),
            "queues": self._queues,
            "tenants": np.zeros((1, 2), np.int64),
            "spans": np.zeros((1, 3), np.int64),
            "state": self._state,
            "memory": self._memory,
        }
        self._tensors = {name: _tvm.as_tensor(array) for name, array in self._arrays.items()}

    def follow(self, script: arrays.array[int], fresh: arrays.array[int], held: Iterable[Unit]) -> list[int]:
        """Go on with what units have written down since; return the numbers of those that know more, or need more.

        Parameters
        ----------
        script, fresh : array[int]
            The cells, and of each piece of them its unit, its first cell and the one behind its last, 0. Both are
            emptied.
        held : Iterable[Unit]
            The units that have more to write down, which is needed when they come to the ends of their scripts.
        """
        for unit in held:  # they come to their ends by a piece of nothing
            self._units[unit.number, m.HELD] = 1
            fresh.extend((unit.number, len(script), len(script)))
            script.append(0)
        self._make_room(len(script) + len(fresh))
        code, state, start = self._arrays["code"], self._state, self._used
        self._used = behind = start + len(script)
        code[start:behind] = script
        code[behind : behind + len(fresh)] = fresh  # which the next cells overwrite
        state[m.SCRIPT], state[m.NEW], state[m.NEWS] = start, behind, len(fresh) // 3
        del script[:], fresh[:]
        self._grow("tenants", len(self._engine.occupancy.tenants))
        if self._engine.traced:
            self._grow("spans", len(code))
        self._follow(*self._tensors.values())
        if state[m.SPANS]:
            for number, begun, ended in self._arrays["spans"][: state[m.SPANS]].tolist():
                self._engine.units[number].spans.append((begun, ended))
        told: list[int] = self._queues[: state[m.TOLD], m.TELL].tolist()
        state[m.SPANS] = state[m.TOLD] = 0
        return told

    def _make_room(self, cells: int) -> None:
        """Have room for so many cells: first where those are that units have followed, then in a longer array."""
        code = self._arrays["code"]
        if self._used + cells <= len(code):
            return
        self._set("code", np.empty_like(code))
        self._tidy(_tvm.as_tensor(code), *(self._tensors[name] for name in ("code", "units", "state")))
        self._used = int(self._state[m.NEW])
        if 2 * (self._used + cells) > len(code):
            self._grow("code", 2 * (self._used + cells))

    def _grow(self, name: str, rows: int) -> None:
        """Make an array longer if it isn't as long as that."""
        array = self._arrays[name]
        if rows > len(array):
            self._set(name, np.concatenate([array, np.zeros((rows, *array.shape[1:]), np.int64)]))

    def _set(self, name: str, array: np.ndarray) -> None:
        self._arrays[name], self._tensors[name] = array, _tvm.as_tensor(array)

    @property
    def late(self) -> Unit | None:
        number = int(self._state[m.LATE])
        return None if number < 0 else self._engine.units[number]

    def answer(self, number: int) -> int:
        """Return the answer to what a unit asked."""
        return int(self._units[number, m.ANSWER])

    def time(self, number: int) -> int:
        """Return the cycle that a unit has come to."""
        return int(self._units[number, m.CLOCK])

    def finish(self) -> None:
        """Say to units, channels and tenants what has become of them."""
        engine, units = self._engine, self._engine.units
        columns = [m.CLOCK, m.BUSY, m.BLOCKED, m.MEMORY, m.TOKENS, m.STATE]
        for channel, count in zip(engine.channels, self._channels[:, m.COUNT].tolist()):
            channel.count = count
        for unit, row in zip(units, self._units[:, columns].tolist()):
            unit.clock, unit.busy, unit.blocked, unit.memory, unit.tokens, state = row
            unit.done = state == m.ENDED
            if not unit.done:
                unit.waits = self._awaited(unit)
        for tenant, (start, stop) in zip(engine.occupancy.tenants, self._arrays["tenants"].tolist()):
            tenant.start, tenant.stop = start, stop
        rate = self._memory[m.RATE]
        if rate:
            engine.off_chip_busy = float((self._memory[m.SERVED] + self._memory[m.PENDING]) / rate)

    def _cell(self, at: int) -> int:
        """Return the cell that comes next from that address on; 0 if that isn't known yet."""
        cell = int(self._arrays["code"][at])
        return cell if not cell or cell & 15 else self._cell(cell >> 4)

    def _awaited(self, unit: Unit) -> Sequence[Channel]:
        """Return the channels that a unit waits for."""
        cell = self._cell(int(self._units[unit.number, m.AT]))
        step = cell & 15
        if step in (steps.GO, steps.FIRST):
            return [channel for channel in unit.inputs if channel.waiter is unit] or unit.waits
        takes, sends = step in (steps.PEEK, steps.TAKE, steps.READ), step in (steps.ROOM, steps.SEND)
        if not (takes or sends):
            return ()
        channel = (unit.inputs if takes else unit.outputs)[cell >> 5]
        return () if self._channels[channel.number, m.COUNT if takes else m.SPACE] else (channel,)
