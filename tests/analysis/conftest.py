"""Finds the modules of this folder that its tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
