"""What the nests of a CPU's functions are, and how each is best scheduled: registers, rows, columns, planes, loops.

Design spaces of tuning (`tvm_axe.meta.spaces`) are made of these, and a function that nobody scheduled takes the first
of them that fits (`with_default_schedules`), one whose extents aren't known one for each range of them (`with_ranges`).
Functions that are the same for any leading extents are compiled once (`with_equal_ones_once`).
"""

from tvm_axe.nests.any_rows import with_equal_ones_once
from tvm_axe.nests.default import with_default_schedules
from tvm_axe.nests.ranges import ranges_of, with_ranges
from tvm_axe.nests.representatives import MADE_OF, Values, check_values, names_of

__all__ = [
    "MADE_OF",
    "Values",
    "check_values",
    "names_of",
    "ranges_of",
    "with_default_schedules",
    "with_equal_ones_once",
    "with_ranges",
]
