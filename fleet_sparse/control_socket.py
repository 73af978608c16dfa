"""Unix sockets of control planes that only this machine reaches, in a directory that only their user can enter.

The port of a pserver's address names its socket. The pserver reserves that port by binding it, and listens on it never.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from fleet_sparse.errors import SettingError
from fleet_sparse.net_addresses import LOOPBACK, Address

_MAX_PATH_BYTES = 107
"""Length of the longest path of a Unix socket, without the zero byte at its end."""
_LOCAL_HOSTS = (LOOPBACK, "localhost")
_CONNECT_S = 2.0


def has_socket(address: Address) -> bool:
    """Returns whether the control plane at an address has a Unix socket, if the settings of the job allow one."""
    return address.host in _LOCAL_HOSTS


def socket_path(port: int) -> Path:
    """Returns the path of the socket that a port names, in a directory that exists and is this user's alone.

    The directory is `fleet_sparse-<uid>` in `XDG_RUNTIME_DIR`, or in the directory of temporary files; it is made if it
    is not there, so that no other user can make it later.

    Raises:
        SettingError: The directory is a link, of another user or open to others; or the path is too long for a socket.
    """
    directory = Path(_root()) / f"fleet_sparse-{os.getuid()}"
    where = f"control socket: {directory}"
    advice = "Remove it, or set XDG_RUNTIME_DIR of all processes of the job to a directory of your own"
    try:
        with suppress(FileExistsError):
            directory.mkdir(0o700)
        found = directory.lstat()
    except OSError as error:
        raise SettingError(
            f"{where}: {error.strerror}. Make the directory above it, or set XDG_RUNTIME_DIR of all processes of the "
            "job to another one"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise SettingError(f"{where}: is a link or a file, should be a directory. {advice}")
    if found.st_uid != os.getuid():
        raise SettingError(f"{where}: belongs to user {found.st_uid}, should belong to user {os.getuid()}. {advice}")
    if found.st_mode & 0o077:
        raise SettingError(f"{where}: its mode is {found.st_mode & 0o777:o}, should be 700. {advice}")
    path = directory / f"{port}.sock"
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise SettingError(
            f"control socket: {path} has {len(os.fsencode(path))} bytes, a socket's path can have {_MAX_PATH_BYTES}. "
            "Set XDG_RUNTIME_DIR of all processes of the job to a shorter one"
        )
    return path


def missing_socket(port: int) -> str:
    """Returns where a client looked for the socket that a port names, if there is none; else an empty string."""
    path = socket_path(port)
    if path.exists():
        return ""
    variable = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "TMPDIR, without XDG_RUNTIME_DIR,"
    return (
        f"there is no {str(path)!r}: the pserver is not up, and its log may say why, or it runs as another user than "
        f"{os.getuid()}, or its {variable} is not {_root()!r}. Set the same for all processes of the job"
    )


def _root() -> str:
    return os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()


class ControlSocket:
    """The place of a control plane's socket, whose port is reserved until `close`.

    A lock in the directory reserves the port among pservers of this user, in all network namespaces; the port itself is
    bound, so that nobody else listens there.

    Args:
        address: Address of the pserver; port 0 lets the system choose one.

    Attributes:
        port: The port that is reserved.
        path: Path of the socket. No file is there yet.

    Raises:
        OSError: The port is in use.
        SettingError: As `socket_path`.
    """

    def __init__(self, address: Address) -> None:
        with ExitStack() as undo:
            bound = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier listener linger
            bound.bind((LOOPBACK, address.port))
            self.port: int = bound.getsockname()[1]
            self.path = socket_path(self.port)
            self._lock_path = self.path.with_suffix(".lock")
            undo.callback(os.close, _locked(self._lock_path))
            self.path.unlink(missing_ok=True)  # of a process that was killed: one that lives has the lock
            self._reserved = undo.pop_all()

    def close(self) -> None:
        """Removes the socket and frees the port."""
        self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
        self._reserved.close()


def _locked(path: Path) -> int:
    """Returns the descriptor of a file that this process alone has locked.

    Raises:
        OSError: Another process has the lock.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    return lock
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(errno.EADDRINUSE, f"a process has the lock {path}") from error
        os.close(lock)  # the process that had it removed the file meanwhile


def is_served(path: Path) -> bool:
    """Returns whether a process listens on a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # as one whose backlog is full
            return True
    return True
