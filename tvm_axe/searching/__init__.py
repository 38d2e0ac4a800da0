"""Find the schedule: every one that the primitives' rules allow is enumerated, and the promising ones are measured.

```
found = axe.search(adam, mesh=axe.Mesh({"dp": 2}), keep=("m_out", "v_out"))
print(found.table())              # fuse(RS-C-AG) first
exe = axe.compile(found.best.sch)
```
"""

from .job import Found, SearchResult, search
from .moves import Candidate, schedules
from .seeds import seed_schedule

__all__ = ["Candidate", "Found", "SearchResult", "schedules", "search", "seed_schedule"]
