"""Which algorithm does a collective of so many bytes: a table for a machine, measured once, and what stands in for it.

The bytes are those of the whole message on a device, the larger one of its slabs of source and target. A table is a
JSON file in the work directory, ``collectives/<machine>.json``, which `tvm-axe doctor --measure` writes, and the engine
reads when it is launched; the machine is what its devices are called, how many there are and how they are linked. Where
there is none, H100s and H200s on NVLink have one that is shipped, and all else a rule of the link:

- An all-reduce among n devices takes (n-1)(n-2)/n more bytes into each in one shot than in two, and saves what it takes
  to have writes seen, so it is in one shot up to where both are as much.
- What is only copied goes by copy engines from `ENGINE` bytes a block on.

>>> table = ruled(Link(latency=5e-6, bandwidth=360e9), 4, "this example")
>>> str(table.chosen("all_reduce", 1 << 10, in_place=False)), str(table.chosen("all_reduce", 1 << 22, in_place=False))
('one-shot', 'two-shot')
>>> print(table)
all_reduce: one-shot to 234 KiB, then two-shot
all_gather: one-shot to 16 MiB, then copy-engine
all_gather_in_place: one-shot to 16 MiB, then copy-engine
all_to_all: one-shot to 16 MiB, then copy-engine
send: one-shot to 4 MiB, then copy-engine
broadcast: one-shot to 4 MiB, then copy-engine
reduce_scatter, reduce: one-shot
from this example
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_axe.collective.algorithms import Algorithm, offered
from tvm_axe.collective.plan import VIEWS
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError
from tvm_axe.layout import Link
from tvm_axe.layout.collectives import Collective

__all__ = ["ENGINE", "FOLDER", "Machine", "Table", "find", "forced", "read", "ruled", "shipped"]

FOLDER = "collectives"
"""Where tables lie in a work directory."""

ENGINE = 4 << 20
"""Bytes; a copy engine is as fast as a kernel for blocks that are as large or larger."""

_AS_FAST = 128 << 20  # bytes, of which copy engines among H200s take as long as kernels, within 3%
_SEEN = 1e-6  # seconds; what it takes to have a peer see what was written to it, over NVLink
_ALL_REDUCE = Collective.ALL_REDUCE.operation
_PARTED = (Collective.ALL_GATHER.operation, "all_gather_in_place", Collective.ALL_TO_ALL.operation)
_Row = list[tuple[int | None, Algorithm]]
_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


@dataclass(frozen=True)
class Machine:
    """What a table is for: what the devices are called, how many there are, and what links them."""

    name: str
    devices: int
    link: str

    def __str__(self) -> str:
        return f"{self.devices} {self.name} by {self.link}"

    @property
    def file(self) -> str:
        """The name of the table's file."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.name}-{self.devices}-{self.link}").strip("-") + ".json"


@dataclass(frozen=True)
class Table:
    """Algorithms by collective and size.

    Parameters
    ----------
    rows : mapping
        Of each collective, by its name in `plan.VIEWS`, (bytes, algorithm): what is used below that many, in rising
        order; the last has None for them. One that is left out is done in one shot.
    source : str
        Where it is from.

    Raises
    ------
    InputError
        For an unknown collective, an algorithm that isn't offered for it, or limits that don't rise.
    """

    rows: Mapping[str, Sequence[tuple[int | None, Algorithm]]]
    source: str

    def __post_init__(self) -> None:
        for name, row in self.rows.items():
            if name not in VIEWS:
                raise InputError(f"collectives: {name!r} is none; valid: {', '.join(VIEWS)}")
            limits = [limit for limit, _ in row]
            *others, last = limits or [0]
            if last is not None or None in others or sorted(set(others), key=_rank) != others:
                raise InputError(f"collectives: the limits of {name} must rise and end with none, not {limits}")
            for _, algorithm in row:
                if algorithm not in offered(name, in_place=False):
                    raise InputError(f"collectives: {algorithm} is no algorithm of {name}")

    def chosen(self, name: str, nbytes: int, in_place: bool) -> Algorithm:
        """Return the algorithm for a collective of so many bytes; the next one that is for it if it is in place."""
        valid = offered(name, in_place)
        above = [algorithm for limit, algorithm in self.rows.get(name, ()) if limit is None or nbytes < limit]
        return next((algorithm for algorithm in above if algorithm in valid), valid[0])

    def row(self, name: str) -> str:
        """Return which algorithm a collective takes up to which size, in words."""
        row = self.rows.get(name, [(None, Algorithm.ONE_SHOT)])
        words = [f"{algorithm} to {_size(limit)}" for limit, algorithm in row if limit is not None]
        return ", ".join([*words, ("then " if words else "") + str(row[-1][1])])

    def encode(self) -> dict[str, Any]:
        """Return what `decode` makes a table of, that JSON can hold."""
        rows = {name: [[limit, str(algorithm)] for limit, algorithm in row] for name, row in self.rows.items()}
        return {"rows": rows, "source": self.source}

    @staticmethod
    def decode(told: Mapping[str, Any]) -> Table:
        """Return the table of what `encode` returned."""
        rows = {
            name: [(None if limit is None else int(limit), Algorithm.of(algorithm)) for limit, algorithm in row]
            for name, row in told["rows"].items()
        }
        return Table(rows, str(told["source"]))

    def __str__(self) -> str:
        lines = [f"{name}: {self.row(name)}" for name in self.rows]
        rest = [name for name in VIEWS if name not in self.rows]
        if rest:
            lines.append(f"{', '.join(rest)}: {Algorithm.ONE_SHOT}")
        return "\n".join([*lines, f"from {self.source}"])


def ruled(link: Link, parts: int, source: str) -> Table:
    """Return the table that follows from how fast devices are linked, for `parts` of them."""
    return _table(_shots(_crossing(link.bandwidth * _SEEN, parts)), parts * ENGINE, ENGINE, source)


def shipped(machine: Machine) -> Table | None:
    """Return the table of a machine whose times are known; None if they aren't.

    Those of two and four are measured, on H200s (docs/results/2026-11-26-two-h200s.md, 2026-11-28-four-h200s.md): what
    is only copied goes in one shot up to where copy engines are as fast, which leave the processors alone. Sums among
    four are as fast in one shot as in two steps at 256 KiB, and go in two steps as long as words mark themselves.
    Three, and those between four and eight, are taken for four.

    vLLM's all-reduce on eight H200s (in graphs; aiconfigurator-core 0.12.0, h200_sxm) is in one shot up to 256 KiB. Its
    line there meets that of two shots, drawn on from 1 and 2 MiB, at 226 KB; where ours meet is assumed to be there,
    too, a little below, until it is measured.
    """
    if machine.link != "NVLink" or not re.search(r"\bH(100|200)\b", machine.name) or machine.devices < 2:
        return None
    if machine.devices == 2:
        return _table(_shots(16 << 20), _AS_FAST, 64 << 20, "what was measured on two H200s on NVLink")
    if machine.devices < 8:
        summed = [(256 << 10, Algorithm.ONE_SHOT), (1280 << 10, Algorithm.TWO_STEP), (None, Algorithm.TWO_SHOT)]
        return _table(summed, _AS_FAST, 64 << 20, "what was measured on four H200s on NVLink")
    where = "published times of H200s on NVLink (aiconfigurator-core 0.12.0), until they are measured here"
    return _table(_shots(216 << 10), machine.devices * ENGINE, ENGINE, where)


def forced(name: str) -> Table:
    """Return the table that has one algorithm for all sizes of all collectives that it is offered for.

    Raises
    ------
    InputError
        If there is none of that name.
    """
    algorithm = Algorithm.of(name)
    return Table(
        {each: [(None, algorithm)] for each in VIEWS if algorithm in offered(each, in_place=False)},
        f'collectives="{algorithm}"',
    )


def find(machine: Machine, link: Link, work_dir: str | Path = WORK_DIR) -> Table:
    """Return the table of a machine: what was measured, what is shipped, or what the link's rule gives."""
    return read(machine, work_dir) or shipped(machine) or ruled(link, machine.devices, f"the rule of {machine.link}")


def read(machine: Machine, work_dir: str | Path = WORK_DIR) -> Table | None:
    """Return the table that was measured on a machine; None if there is none, or, with a warning, a broken one."""
    path = Path(work_dir) / FOLDER / machine.file
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        when = str(told.get("origin", {}).get("date", ""))
        return Table.decode({**told, "source": f"{told['source']}{' on ' if when else ''}{when}"})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InputError) as error:
        warnings.warn(f"{path} can't be read ({error}); tvm-axe doctor --measure writes it anew", stacklevel=2)
        return None


def _shots(limit: int | None) -> _Row:
    """The row of an all-reduce in one shot up to `limit`."""
    if limit is None:
        return [(None, Algorithm.ONE_SHOT)]
    return [(limit, Algorithm.ONE_SHOT), (None, Algorithm.TWO_SHOT)]


def _table(summed: _Row, parted: int, whole: int, source: str) -> Table:
    """The table of an all-reduce by its row, and of copies by engines from so many bytes on.

    Of `parted` messages each device has a part; others go as a `whole`.
    """
    rows: dict[str, _Row] = {_ALL_REDUCE: summed}
    for name in VIEWS:
        if Algorithm.COPY_ENGINE in offered(name, in_place=False) and name != _ALL_REDUCE:
            rows[name] = [(parted if name in _PARTED else whole, Algorithm.ONE_SHOT), (None, Algorithm.COPY_ENGINE)]
    return Table(rows, source)


def _crossing(saved: float, parts: int) -> int | None:
    """The bytes up to which one shot is as good as two, if it saves the time of so many bytes; None if always."""
    more = (parts - 1) * (parts - 2)
    return None if more <= 0 else max(1 << 10, int(saved * parts / more) >> 10 << 10)


def _rank(limit: int | None) -> float:
    return float("inf") if limit is None else limit


def _size(nbytes: int) -> str:
    """So many bytes, in the largest unit that they are a multiple of."""
    for shift, unit in _UNITS:
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
