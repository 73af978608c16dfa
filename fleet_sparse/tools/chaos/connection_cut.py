"""Connections of another process that are cut from outside, without its help."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from fleet_sparse.errors import FleetSparseError

_PIDFD_GETFD = 438  # the number of the system call, the same on all machines


def cut_connections(pid: int) -> int:
    """Cuts all connections of a process in both directions, Unix sockets and TCP; returns their number.

    The process and its peers see connections that the other side has closed. Frames that are under way are lost, in
    part or as a whole. Listening sockets and sockets without an address, as those of a socket pair, stay.

    Args:
        pid: The process, of the same user and below this one.

    Raises:
        FleetSparseError: The system does not permit it.
        ProcessLookupError: The process has ended.
    """
    process = os.pidfd_open(pid)
    try:
        num_cut = 0
        for path in Path(f"/proc/{pid}/fd").iterdir():
            target = ""
            with suppress(FileNotFoundError):  # it was closed meanwhile
                target = os.readlink(path)
            if target.startswith("socket:") and (descriptor := _duplicate(process, int(path.name))) is not None:
                with socket.socket(fileno=descriptor) as connection:
                    num_cut += _cut(connection)
        return num_cut
    finally:
        os.close(process)


def _duplicate(process: int, descriptor: int) -> int | None:
    """A descriptor of another process as one of this process; None if it was closed meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    ours = int(libc.syscall(_PIDFD_GETFD, process, descriptor, 0))
    if ours >= 0:
        return ours
    number = ctypes.get_errno()
    if number in (errno.EPERM, errno.ENOSYS):
        raise FleetSparseError(
            "chaos: the system does not permit to cut connections of another process (pidfd_getfd). Run as root, or in "
            "a container with the capability SYS_PTRACE, or leave this kind of fault out (--kind)"
        )
    if number == errno.ESRCH:
        raise ProcessLookupError(number, os.strerror(number))
    if number != errno.EBADF:
        raise OSError(number, os.strerror(number))
    return None


def _cut(connection: socket.socket) -> bool:
    if connection.type != socket.SOCK_STREAM or not connection.getsockname():
        return False
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    with suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
