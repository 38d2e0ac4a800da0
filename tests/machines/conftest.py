"""Lets the tests import the folder of a target that they register."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
