"""scripts/fuzz_tiles.py: what it counts, and that a child that dies or hangs is counted with its seed."""

import sys

import fuzz_tiles
import pytest


def test_counts(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fuzz_tiles.py", "--here", "--seed", "0", "--count", "2"])
    assert fuzz_tiles.main() == 0
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("ends, says", [("kill -SEGV $$", "signal SIGSEGV"), ("exec sleep 60", "no answer")])
def test_a_child_that_dies_or_hangs_is_named_by_its_seed(tmp_path, monkeypatch, ends, says):
    child = tmp_path / "child"
    child.write_text(f"""#!/bin/sh
echo '{{"case": ['$7', "begun", ""]}}'
test $7 = 5 && {{ {ends}; }}
echo '{{"case": ['$7', "right", ""]}}'
""")
    child.chmod(0o755)
    monkeypatch.setattr(fuzz_tiles.sys, "executable", str(child))
    first, second = fuzz_tiles.apart(range(5, 7), "llvm", 20.0 if "SEGV" in ends else 2.0)
    assert first[:2] == (5, "ended") and says in first[2]
    assert second == (6, "right", "")


def test_a_wrong_program_is_an_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(fuzz_tiles, "outcome", lambda seed, *_: ("wrong", "it differs"))
    monkeypatch.setattr(sys, "argv", ["fuzz_tiles.py", "--here", "--seed", "7", "--count", "1"])
    assert fuzz_tiles.main() == 1
    assert "wrong or ended: seeds 7" in capsys.readouterr().out
