"""Lets the tests import the folder of a target that they register, and `random_indices`, which lies beside this one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))
