"""What the tests of tile programs share lies beside them: `interpreter` and files of programs are imported by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent))  # `random_indices`
