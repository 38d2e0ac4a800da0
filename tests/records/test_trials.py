"""The log of trials beside a database."""

from __future__ import annotations

from dataclasses import replace

from tvm_axe.records.database import FAILED_SECONDS
from tvm_axe.records.trials import TRIALS, Trial, add_missing, key_of, read_trials, write_trial

_TRIAL = Trial("00", "2025-01-01T00:00:00.000+00:00", 1.5, 2e-3, None, 0.1, 0.2)


def test_what_is_written_is_read_in_order(tmp_path):
    failed = replace(_TRIAL, record="01", seconds=None, failure="crashed (SIGSEGV)")
    assert read_trials(tmp_path) == []
    for trial in (_TRIAL, failed):
        write_trial(tmp_path, trial)
    assert read_trials(tmp_path) == [_TRIAL, failed]


def test_a_line_cut_short_costs_itself_only(tmp_path):
    for key in ("00", "01"):
        write_trial(tmp_path, replace(_TRIAL, record=key))
    path = tmp_path / TRIALS
    path.write_bytes(path.read_bytes()[:-20])
    write_trial(tmp_path, replace(_TRIAL, record="02"))
    assert [trial.record for trial in read_trials(tmp_path)] == ["00", "02"]
    with open(path, "ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"record": "03"}\n')
    assert [trial.record for trial in read_trials(tmp_path)] == ["00", "02"]


def test_records_without_a_line_get_one(tmp_path):
    write_trial(tmp_path, _TRIAL)
    add_missing(tmp_path, [("00", 2e-3), ("01", 3e-3), ("02", FAILED_SECONDS)])
    first, second, third = read_trials(tmp_path)
    assert first == _TRIAL
    assert (second.record, second.elapsed, second.seconds, second.failure) == ("01", None, 3e-3, None)
    assert (third.seconds, third.failure) == (None, "not recorded")
    size = (tmp_path / TRIALS).stat().st_size
    add_missing(tmp_path, [("00", 2e-3), ("02", FAILED_SECONDS)])
    assert (tmp_path / TRIALS).stat().st_size == size


def test_of_two_lines_on_one_record_the_later_counts(tmp_path):
    add_missing(tmp_path, [("00", 2e-3)])
    write_trial(tmp_path, _TRIAL)
    assert read_trials(tmp_path) == [_TRIAL]


def test_a_key_tells_records_apart_whatever_the_order_of_their_fields():
    entry = [[["a"], []], [1e-3], {"kind": "llvm", "mcpu": "znver5"}, []]
    assert key_of(entry) == key_of([*entry[:2], {"mcpu": "znver5", "kind": "llvm"}, []])
    assert key_of(entry) != key_of([entry[0], [2e-3], *entry[2:]])
