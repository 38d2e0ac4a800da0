"""When a machine's probe speaks against it, and where the scale of all times is kept."""

from __future__ import annotations

import json
import math
import warnings

import pytest

from tvm_axe.meta.fleet.fingerprint import Fingerprint
from tvm_axe.meta.fleet.fleet import Fleet
from tvm_axe.meta.fleet.probe import probe_function
from tvm_axe.meta.fleet.scale import FILE, Reference, probed

FLEET = Fleet("board", "k")
REFERENCE = Reference("first", Fingerprint("znver4", "AMD", 8, 3000, versions={"tvm-axe": "1"}), 1.25e-4)


@pytest.mark.parametrize(
    "times, first, why",
    [
        ([1e-3] * 5, None, ""),
        ([1e-3] * 5, 1e-3, ""),
        ([1e-3], 1e-3, ""),
        ([], 1e-3, "its probe failed"),
        ([1e-3, 1e-3, 1e-3, 1e-3, 9e-3], None, ""),  # one of five is the system's doing
        ([1e-3, 1e-3, 1e-3, 2e-3, 2e-3], None, "it is noisy: the middle half of a probe's times lies 100% apart"),
        ([1.09e-3] * 5, 1e-3, ""),
        ([0.91e-3] * 5, 1e-3, ""),
        ([1.2e-3] * 5, 1e-3, "it drifts: the probe takes 1.2 ms, and took 1 ms at first"),
        ([0.8e-3] * 5, 1e-3, "it drifts: the probe takes 0.8 ms, and took 1 ms at first"),
    ],
)
def test_what_speaks_against_a_machine(times, first, why):
    found = probed(times, first, FLEET)
    assert found.startswith(why) and bool(found) == bool(why)


def test_a_fleet_says_how_much_is_too_much():
    times = [1e-3, 1e-3, 1.2e-3, 1.4e-3, 1.4e-3]
    assert "noisy" in probed(times, None, FLEET)
    assert probed(times, 1e-3, Fleet("board", "k", noise=0.5, drift=0.3)) == ""
    assert "drifts" in probed(times, 1e-3, Fleet("board", "k", noise=0.5))


def test_a_reference_is_kept_by_key(tmp_path):
    assert Reference.read(tmp_path, "k") is None
    REFERENCE.write(tmp_path, "k")
    other = Reference("another", REFERENCE.fingerprint, 2e-4)
    other.write(tmp_path, "other")
    assert Reference.read(tmp_path, "k") == REFERENCE
    assert Reference.read(tmp_path, "other") == other
    assert Reference.read(tmp_path, "third") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"k": 1}', '{"k": {"machine": "m", "fingerprint": 1, "probe": 1}}'])
def test_one_that_cannot_be_read_is_begun_anew(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.warns(UserWarning, match=r"fleet.json cannot be read \(.*\); a new scale is begun"):
        assert Reference.read(tmp_path, "k") is None
    REFERENCE.write(tmp_path, "k")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Reference.read(tmp_path, "k") == REFERENCE
    assert json.loads((tmp_path / FILE).read_text())["k"]["machine"] == "first"


def test_the_probe_uses_all_cores_and_no_memory_beyond_caches():
    main = probe_function()["main"]
    assert "T.parallel" in main.script()
    assert sum(4 * math.prod(map(int, param.ty.shape)) for param in main.params) < 1 << 20
