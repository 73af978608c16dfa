"""What goes on in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(act: Callable[[], object]) -> str:
    """What `act` returns in a child forked from the calling thread, as text, or the name of what it raises."""
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
        told = pipe.read()
    os.waitpid(child, 0)
    return told
