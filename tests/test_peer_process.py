"""A peer in a process of its own: asked and answered by lines, and what it says where something fails."""

import pytest
from peer_process import PeerProcess

SCRIPT = """
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "end":
        sys.exit(3)
    answer = {"failed": "ValueError: no"} if asked["do"] == "fail" else {**asked, "path": os.environ["PYTHONPATH"]}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def peer(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    made = PeerProcess(tmp_path / "script.py", tmp_path / "libraries")
    yield made
    made.end()


def test_it_answers_and_finds_its_own_libraries_alone(peer, tmp_path):
    assert peer.ask("say", seeds=[1, 2]) == {"do": "say", "seeds": [1, 2], "path": str(tmp_path / "libraries")}
    with pytest.raises(RuntimeError, match=r"script\.py: ValueError: no"):
        peer.ask("fail")
    assert peer.ask("again")["do"] == "again"


def test_its_end_is_said(peer):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"script\.py ended with exit code 3"):
            peer.ask("end")
