"""What is the same wherever nothing else is said."""

__all__ = ["TRACKER_PORT", "VALUES", "WORK_DIR"]

WORK_DIR = "tuning_logs/local"
"""Where tuning keeps its records and compiling looks them up, under the current folder.

It is apart from what a checkout of this package has in ``tuning_logs``, the records that ship, and git ignores it.
"""

VALUES = (1, 16, 128, 1024)
"""Representatives of an extent that isn't known until a function is called: what it is tuned and scheduled for."""

TRACKER_PORT = 9190
"""Where a fleet's tracker listens, as upstream's does."""
