"""A worker whose sessions say something else of this machine than is true: ``TVM_AXE_ODD`` has fields as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tvm_axe.cli import main
from tvm_axe.meta.fleet import server
from tvm_axe.meta.fleet.fingerprint import Fingerprint

_own = Fingerprint.own


def serve_session(*arguments: Any, **named: Any) -> None:
    """Be a session's process."""
    Fingerprint.own = lambda: Fingerprint(**{**_own().encode(), **json.loads(os.environ["TVM_AXE_ODD"])})
    server.serve_session(*arguments, **named)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where sessions find this module
    server._ENTRY = "odd_worker:serve_session"
    sys.exit(main(sys.argv[1:]))
