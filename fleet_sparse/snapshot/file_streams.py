"""Files of a `Directory` as Python streams, for numpy and pyarrow."""

from __future__ import annotations

import io
from collections.abc import Callable

from .directory import InputFile, OutputFile


class OutputStream(io.RawIOBase):
    """Writes a file from its beginning to its end. Closing the stream does not finish the file."""

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        self._offset = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]  # numpy, zipfile and pyarrow write one of these two
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._offset += len(view)
        return len(view)

    def tell(self) -> int:
        return self._offset


class InputStream(io.RawIOBase):
    """Reads a file. Closing the stream does not close the file.

    Args:
        file: Open.
        on_read: Called with the number of bytes of each read.
    """

    def __init__(self, file: InputFile, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        self._file = file
        self._on_read = on_read
        self._offset = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._file.size}[whence]
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # its callers pass memory
        view = memoryview(buffer).cast("B")
        view = view[: max(min(len(view), self._file.size - self._offset), 0)]
        if view:
            self._file.read_into(self._offset, view)
            self._offset += len(view)
            self._on_read(len(view))
        return len(view)
