"""The names of collectives."""

import json

import pytest

from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.workers import Workers
from tvm_axe.layout.collectives import Collective


@pytest.mark.parametrize("collective", Collective)
def test_names(collective):
    """What was written to a file as a string is the collective, and the other way round."""
    assert Collective(str(collective)) is collective and collective == str(collective)
    assert json.loads(json.dumps({"kind": collective})) == {"kind": str(collective)}
    assert f"{collective}" == str(collective) and type(str(collective)) is str
    assert {str(collective): 1}[collective] == 1
    assert collective.operation in VIEWS and callable(getattr(Workers, collective.operation))
    assert collective.letters.isupper() or collective.letters in ("A2A", "P2P")


def test_no_name_is_shared():
    for names in ([c.letters for c in Collective], [c.operation for c in Collective]):
        assert len(set(names)) == len(Collective)
