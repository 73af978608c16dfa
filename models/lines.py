"""Reads text files in batches of lines."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

GZIP_MAGIC = b"\x1f\x8b"

HELD_OUT = 10
"""If one file is used for training and testing, every tenth batch is held out."""


class LineBatch(NamedTuple):
    """Consecutive lines of a file."""

    path: Path
    first: int
    """Line number of the first line, from 1."""
    texts: list[str]
    """The lines, without line ends."""

    def error(self, index: int, complaint: str) -> ValueError:
        """Makes an error for the line at `index`, with file and line number."""
        return ValueError(f"{self.path}:{self.first + index}: {complaint}")


def batches(path: Path, size: int) -> Iterator[LineBatch]:
    """Reads a file, plain or gzip, `size` lines at a time; the last batch has the remaining lines.

    Of a directory, all files are read, one after the other in the order of their names, and directories in it are left
    out. One batch is in memory at a time.

    Raises:
        OSError: A file cannot be opened or read.
        ValueError: A file is not text in UTF-8, or a directory has no file.
    """
    for each in _files(path):
        with _open(each) as file:
            first = 1
            while texts := list(itertools.islice(_decoded(each, first, file), size)):
                yield LineBatch(each, first, texts)
                first += len(texts)


def train_batches(
    path: Path, size: int, *, worker_index: int, num_workers: int, is_held_out: bool
) -> Iterator[LineBatch]:
    """The training batches of a worker: batch `i` belongs to worker `i % num_workers`.

    With `is_held_out` the batches that `test_batches` returns for the same file are left out.
    """
    trained = (lines for index, lines in enumerate(batches(path, size)) if not (is_held_out and _is_test(index)))
    return itertools.islice(trained, worker_index, None, num_workers)


def test_batches(path: Path, size: int, *, is_held_out: bool) -> Iterator[LineBatch]:
    """The test batches: every batch of the file, or every tenth with `is_held_out`."""
    return (lines for index, lines in enumerate(batches(path, size)) if not is_held_out or _is_test(index))


def _is_test(index: int) -> bool:
    return index % HELD_OUT == HELD_OUT - 1


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.is_file())
    if not files:
        raise ValueError(f"{path}: has no file")
    return files


def _open(path: Path) -> TextIO:
    with open(path, "rb") as file:
        magic = file.read(len(GZIP_MAGIC))
    if magic == GZIP_MAGIC:
        return gzip.open(path, "rt", encoding="utf-8", newline="\n")
    return open(path, encoding="utf-8", newline="\n")


def _decoded(path: Path, first: int, file: TextIO) -> Iterator[str]:
    try:
        for text in file:
            yield text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text, at or after line {first}: {error}") from error
