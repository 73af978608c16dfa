"""Text files in batches of lines."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

GZIP_MAGIC = b"\x1f\x8b"

HELD_OUT = 10
"""Where a file is both trained and tested on, every tenth batch of it is held out."""


class Lines(NamedTuple):
    """Lines that follow each other in a file."""

    path: Path
    first: int
    """Number of the first of them in the file, from 1."""
    texts: list[str]
    """Without their line ends."""

    def error(self, index: int, complaint: str) -> ValueError:
        """The error of the line at `index`, with file and line number."""
        return ValueError(f"{self.path}:{self.first + index}: {complaint}")


def batches(path: Path, size: int) -> Iterator[Lines]:
    """The lines of a file, plain or gzip, `size` at a time; the last batch has what is left.

    One batch is held at a time.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: The file is not text in UTF-8.
    """
    with _open(path) as file:
        first = 1
        while texts := list(itertools.islice(_decoded(path, first, file), size)):
            yield Lines(path, first, texts)
            first += len(texts)


def train_batches(path: Path, size: int, *, worker_index: int, num_workers: int, is_held_out: bool) -> Iterator[Lines]:
    """A worker's share: batch `i` of those that are trained on belongs to worker `i % num_workers`.

    With `is_held_out`, the batches that `test_batches` gives of the same file are no part of them.
    """
    trained = (lines for index, lines in enumerate(batches(path, size)) if not (is_held_out and _is_test(index)))
    return itertools.islice(trained, worker_index, None, num_workers)


def test_batches(path: Path, size: int, *, is_held_out: bool) -> Iterator[Lines]:
    """Every batch of the file; with `is_held_out` every tenth."""
    return (lines for index, lines in enumerate(batches(path, size)) if not is_held_out or _is_test(index))


def _is_test(index: int) -> bool:
    return index % HELD_OUT == HELD_OUT - 1


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
