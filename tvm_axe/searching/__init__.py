"""The schedules of a program: every one that the primitives' rules allow, and what each is expected to take.

```
for candidate in schedules(seed_schedule(adam, mesh), keep=("m_out", "v_out")):
    print(candidate.steps)
```

`tvm_axe.tune` searches them for a program on a mesh, and measures few; `axe.search` (`tvm_axe.searching.job`) measures
all that the link model doesn't rule out.
"""

from .moves import Candidate, one_after_other, schedules, spaces
from .seeds import seed_schedule, sharings

__all__ = ["Candidate", "one_after_other", "schedules", "seed_schedule", "sharings", "spaces"]
