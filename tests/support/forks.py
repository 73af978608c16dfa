"""Calls in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(act: Callable[[], object]) -> str:
    """Returns the result of `act` in a forked child as text, or the name of its exception."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(act()).encode())
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return result
