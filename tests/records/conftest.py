"""The fixtures of `tuning_workloads`, which lies beside this folder and is imported by name, as what lies in it is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from tuning_workloads import commit, dense, matmul, packed_error, target

__all__ = ["commit", "dense", "matmul", "packed_error", "target"]
