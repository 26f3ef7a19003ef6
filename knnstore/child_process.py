"""Child processes that end with their parent, however the parent ends.

This module imports nothing large, so that a new process watches its parent from its first moments on.
"""

import multiprocessing
import os
import threading
from importlib import import_module
from typing import Any


def run_with_parent(module: str, function: str, *arguments: Any) -> None:
    """Import a module in this child process, and call one of its functions; end together with the parent.

    Use this as the target of a `multiprocessing.Process`. A thread ends this process when the parent ends,
    because a parent that is killed cannot end its children. The thread starts before the import, which takes
    seconds for torch. (If a function of the module were the target, the import would come first.)

    Args:
        module: name of the module.
        function: name of the function.
        *arguments: arguments of the function.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    getattr(import_module(module), function)(*arguments)


def _end_with_parent() -> None:
    """Wait until the parent process ends, then end this process at once with exit status 1.

    Does nothing in a process that `multiprocessing` did not start.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
