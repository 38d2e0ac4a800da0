"""The fixtures of `tuning_workloads` that these tests take; it lies beside this folder and is imported by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tuning_workloads import matmul

__all__ = ["matmul"]
