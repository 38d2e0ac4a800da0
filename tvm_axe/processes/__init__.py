"""Processes that import the package once: each is forked by a server that has the imports done and one thread.

To start Python and import the compiler takes a second or more, a fork some milliseconds. `start` is `subprocess.Popen`
for a function of a module instead of a program: the new process gets the environment, the directory, the standard
output and so on that this process has now, as with a fresh start, and calls the function in a session of its own.

```
process = start("package.module:function", {"number": 3}, descriptors=[pipe])
    # there: function([descriptor], number=3)
process.wait()
```

The first `start` starts the server, which then stays up until this process ends, whoever ends it and however. Nothing
has a name that could be left behind: requests go over a pair of sockets.

Who ends whom. The server ends when this process does, and takes all that it has forked along, with what that runs. A
process ends when the server does, or when the last reference to its `Process` goes. A server that died is replaced
when the next process is started. A child that this process forks has no part in any of this: it gets a server of its
own if it starts processes.
"""

from tvm_axe.processes.fresh import interpreter
from tvm_axe.processes.process import LastWords, Process, is_open, start
from tvm_axe.processes.torchless import leave_out_torch

__all__ = ["LastWords", "Process", "interpreter", "is_open", "leave_out_torch", "start"]
