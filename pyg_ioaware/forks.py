"""Locks that a forked child finds free: a thread that held one does not exist in the child."""

import os
from typing import Any


def hold_over_fork(lock: Any) -> None:
    """Makes every fork wait for the lock, so that what it guards is whole in the child."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
