"""One scale for the times of several machines: seconds on the first one, by what each takes for the same probe."""

from __future__ import annotations

import json
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_axe.meta.fleet.fingerprint import Fingerprint
from tvm_axe.meta.fleet.fleet import Fleet
from tvm_axe.records.files import locked, replace_file

__all__ = ["FILE", "Reference", "probed"]

FILE = "fleet.json"
"""Beside a target's databases: each key's `Reference`."""


@dataclass(frozen=True)
class Reference:
    """The machine whose times are the scale of all, for this and for later jobs.

    Attributes
    ----------
    name : str
        The server's.
    fingerprint : Fingerprint
        What it is, and so what all of its key must be.
    probe : float
        Seconds of a call of the probe there.
    """

    name: str
    fingerprint: Fingerprint
    probe: float

    @classmethod
    def read(cls, folder: Path, key: str) -> Reference | None:
        """That of an earlier job; None if there was none."""
        try:
            told = json.loads((folder / FILE).read_text(encoding="utf-8"))[key]
            return cls(str(told["machine"]), Fingerprint.told(told["fingerprint"]), float(told["probe"]))
        except (FileNotFoundError, KeyError):
            return None
        except (ValueError, TypeError) as error:
            warnings.warn(f"{folder / FILE} cannot be read ({error}); a new scale is begun", stacklevel=2)
            return None

    def write(self, folder: Path, key: str) -> None:
        """Keep it for later jobs.

        Raises
        ------
        TuneError
            If it can't be written.
        """
        own = {"machine": self.name, "fingerprint": self.fingerprint.encode(), "probe": self.probe}
        with locked(folder):
            try:
                told = dict(json.loads((folder / FILE).read_text(encoding="utf-8")))
            except (FileNotFoundError, ValueError, TypeError):
                told = {}
            replace_file(folder / FILE, json.dumps({**told, key: own}, indent=1) + "\n")


def probed(times: Sequence[float], first: float | None, fleet: Fleet) -> str:
    """What a probe's times say against a machine, in words; nothing if all is well.

    Parameters
    ----------
    times
        Seconds of the calls of one probe.
    first
        Those of the machine's first probe; None if this is that.
    fleet
        What a job asks of machines.
    """
    if not times:
        return "its probe failed"
    now = statistics.median(times)
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else (now, now, now)
    apart = (upper - lower) / now
    if apart > fleet.noise:
        return f"it is noisy: the middle half of a probe's times lies {apart:.0%} apart, and may {fleet.noise:.0%}"
    if first is not None and abs(now / first - 1) > fleet.drift:
        return f"it drifts: the probe takes {now * 1e3:.4g} ms, and took {first * 1e3:.4g} ms at first"
    return ""
