"""The steps of scripts, which units write down and the compiled machine follows; see `tvm_axe.stream.engine`.

A script is made of cells ``argument << 4 | step``; the argument is one of the unit's ports where nothing else is said.
A unit's first input is port 0, its first output port 1, its second input port 2, and so on, so that units that do the
same write the same cells.
"""

from __future__ import annotations

from typing import Final

GO: Final = 0  # on at another address; a cell of 0 is the end of what is known so far
PEEK: Final = 1  # wait for a token
FREE: Final = 2  # take the token that was looked at
TAKE: Final = 3  # both
ROOM: Final = 4  # wait for room
SEND: Final = 5  # wait for room, and send a token
WORK: Final = 6  # so many cycles
ACCESS: Final = 7  # so many requests to off-chip memory, until they are answered
READ: Final = 8  # be no earlier than the next token's time and the cycles in the next cell
FIRST: Final = 9  # wait for the first token at so many ports, in the next cells, and say which it is
OCCUPY: Final = 10  # a tenant of on-chip memory, by its number, begins
USE: Final = 11  # a tenant is in use
NOW: Final = 12  # say what time it is
ORDER: Final = 13  # find the first token at so many ports, in the next cells, and write its port into the cells behind
END: Final = 14  # nothing follows; what is still sent to the inputs, so many, is thrown away
