"""The text that PaddlePaddle 2.6's parameter server saves its tables as (`fleet.save_persistables`).

A checkpoint has a directory for each table, `000`, `001` and so on. It contains no names, dims or rules. The
files of a sparse table are `part-<server>-<file>.gz`, those of a dense one
`part-<server>.gz`; save modes 1 and 2 leave out the compression. Numbers have six digits.

A line of a sparse table (SparseAccessor and CtrCommonAccessor), fields with one space between them:

    id slot unseen_days delta_score show click w [state of w] [x ... x [state of x]]

`w` is the first value of the row, `x` are the dim - 1 others: Paddle trains them as two parts, each with a state of its
own. The second part is there only once the id was seen often enough (embedx_threshold); until then Paddle's lookup
answers zeros. The id is unsigned; from 2^63 on it stands for a negative one. A line of a dense table is the value of
one parameter and its moments: `p` (SGD) or `p m v` (Adam), the parameters in the order of their names.

Sources: files that 2.6.2 wrote (tests/tools/snapshots/paddle_2_6), and paddle/fluid/distributed/ps/table/ of its
sources: {sparse_accessor,ctr_accessor,sparse_sgd_rule,memory_sparse_table,memory_dense_table}.cc.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.directory import corrupt

from .arrow import arrow

# Indices into the numbers that follow the id of a sparse line.
UNSEEN_DAYS, FIRST_VALUE = 1, 5

_READ_BYTES = 1 << 20
_MAX_LINE_BYTES = 8 << 20
_SAMPLE_BYTES = 1 << 16
_MAX_BATCH_VALUES = 1 << 20
_SHOWN_BYTES = 40
_MAX_DAYS = (1 << 16) - 1
_MAX_ID = (1 << 64) - 1
_FILE = re.compile(r"part-(\d{3,})(?:-(\d{5,}))?(\.gz)?")
_ID = re.compile(rb"\d{1,20}")
_NUMBER = re.compile(rb"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|nan)", re.IGNORECASE)
_SPACE, _LINE_END = b" \n"


ProgressCallback = Callable[[int], None]
"""Called with the number of bytes read so far."""


def _unheard(num_bytes: int) -> None:
    """A `ProgressCallback` that does nothing."""


def after(num_before: int, on_progress: ProgressCallback) -> ProgressCallback:
    """Returns a callback that adds the bytes read before."""
    return lambda num_bytes: on_progress(num_before + num_bytes)


class PaddleRule(NamedTuple):
    """State of a rule of Paddle: `per_value * n + per_part` numbers for a part of `n` values.

    Attributes:
        name: Our short name.
        rule: Our rule whose states have the same meaning.
        per_value: See above.
        per_part: See above.
    """

    name: str
    rule: str
    per_value: int
    per_part: int

    def num_states(self, num_values: int) -> int:
        """Returns the number of state values of a part."""
        return self.per_value * num_values + self.per_part


PADDLE_RULES = {
    rule.name: rule
    for rule in (
        PaddleRule("naive", "sgd", 0, 0),  # SparseNaiveSGDRule
        PaddleRule("adagrad", "adagrad", 0, 1),  # SparseAdaGradSGDRule: g2sum
        PaddleRule("std_adagrad", "adagrad", 1, 0),  # StdAdaGradSGDRule: g2sum of each value
        PaddleRule("adam", "adam", 2, 2),  # SparseAdamSGDRule: gsum and g2sum of each value, beta1^(t+1), beta2^(t+1)
        PaddleRule("shared_adam", "adam", 0, 4),  # SparseSharedAdamSGDRule: gsum, g2sum, beta1^(t+1), beta2^(t+1)
    )
}


class Layout(NamedTuple):
    """Meaning of the numbers of a line, given by rule and dim."""

    rule: PaddleRule
    dim: int

    @property
    def num_short(self) -> int:
        """Numbers after the id of a row with the first part only."""
        return FIRST_VALUE + 1 + self.rule.num_states(1)

    @property
    def num_full(self) -> int:
        """Numbers after the id of a row with both parts."""
        return self.num_short + self.dim - 1 + self.rule.num_states(self.dim - 1)

    def has(self, counts: Collection[int]) -> bool:
        """Returns whether lines may have these counts of numbers after their id."""
        return set(counts) <= {self.num_short, self.num_full}


def layouts_of(counts: Collection[int]) -> list[Layout]:
    """Returns the layouts whose full lines have the largest of these counts, and whose short lines have the others."""
    found = []
    for rule in PADDLE_RULES.values():
        rest = max(counts, default=0) - Layout(rule, 1).num_short - rule.per_part
        if rest >= 0 and rest % (1 + rule.per_value) == 0:
            layout = Layout(rule, 1 + rest // (1 + rule.per_value))
            found += [layout] if layout.has(counts) else []
    return found


class TableFiles(NamedTuple):
    """Directory of a table."""

    directory: Path
    is_sparse: bool
    files: tuple[Path, ...]
    """Files of the table, in the order of their numbers."""
    sizes: tuple[int, ...]
    """Size of each file."""
    counts: dict[int, int]
    """Number of the first lines of all files that have each count of numbers (after the id in a sparse table)."""


def table_files(directory: Path) -> TableFiles:
    """Examines a directory of a checkpoint.

    Raises:
        SnapshotCorrupt: A file is not a gzip file, or is truncated at its beginning.
        SnapshotError: It cannot be read, has no such files, or a file is missing.
    """
    try:
        names = sorted(path.name for path in directory.iterdir() if path.name.startswith("part-"))
    except OSError as error:
        raise SnapshotError(f"{directory}: cannot be listed: {error}") from error
    matches = [_FILE.fullmatch(name) for name in names]
    if not names or None in matches:
        what = f"{names[matches.index(None)]} is" if names else "it has"
        raise SnapshotError(
            f"{directory}: {what} no file of a table; should be part-<server>-<file>.gz or part-<server>.gz, as "
            "Paddle 2.6 writes them"
        )
    kinds = {bool(match[2]) for match in matches if match}
    numbers = sorted(int(match[2] or match[1]) for match in matches if match)
    if len(kinds) > 1 or numbers != list(range(len(numbers))):
        raise SnapshotError(
            f"{directory}: has files {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}, should be those of one "
            f"table, numbered from 0 without a gap. Is one missing, or are two saves mixed?"
        )
    is_sparse = kinds == {True}
    order = sorted(range(len(names)), key=lambda k: _number_of(names[k]))
    files = tuple(directory / names[k] for k in order)
    counts = Counter(count - is_sparse for file in files for count in _field_counts(file))
    sizes = tuple(file.stat().st_size for file in files)
    return TableFiles(directory, is_sparse, files, sizes, dict(sorted(counts.items())))


def _number_of(name: str) -> int:
    match = _FILE.fullmatch(name)
    assert match is not None, "as was checked"
    return int(match[2] or match[1])


def _field_counts(path: Path) -> Iterator[int]:
    """Returns the number of fields of each of the first lines."""
    begin = b""
    for piece in pieces(path):
        begin += piece[:_SAMPLE_BYTES]
        if len(begin) >= _SAMPLE_BYTES:
            break
    return (len(line.split()) for line in begin[: begin.rfind(b"\n") + 1].splitlines() if line)


def pieces(path: Path, on_progress: ProgressCallback = _unheard) -> Iterator[bytes]:
    """The text of a file, uncompressed, in pieces of up to 1 MB.

    Args:
        path: Path of the file.
        on_progress: Called with the number of bytes of the file read so far.

    Raises:
        SnapshotCorrupt: It is named as a gzip file but is not one, has a wrong checksum, or is truncated.
        SnapshotError: It cannot be read.
    """
    num_bytes = 0
    try:
        with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as text:
            while piece := text.read(_READ_BYTES):
                num_bytes += len(piece)
                on_progress(file.tell())
                yield piece
            if path.suffix == ".gz" and not file.tell():  # no bytes are no error to `gzip`
                raise EOFError("it is empty")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise corrupt(str(path), f"it is not a complete gzip file: {error}", num_bytes) from error
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error}") from error


class Lines(NamedTuple):
    """Some lines of a file."""

    path: Path
    number: int
    """Number of the first line, from 1."""
    offsets: NDArray[np.int64]
    """`(n,)`, offset of each line in the text."""
    ids: NDArray[np.int64]
    """`(n,)`; 0 in a dense table."""
    values: NDArray[np.float32]
    """`(n, width)`, 0 where a line has fewer values."""
    counts: NDArray[np.int64]
    """`(n,)`, number of values of each line."""

    def check(self, is_right: NDArray[np.bool_], what: str) -> None:
        """Checks lines. In `what`, `{}` stands for the number of values of the wrong line.

        Raises:
            SnapshotCorrupt: A line is wrong; the first one is named.
        """
        if not is_right.all():
            line = int(is_right.argmin())
            message = f"line {self.number + line}: {what.format(self.counts[line])}"
            raise corrupt(str(self.path), message, int(self.offsets[line]))


def lines_of(path: Path, *, has_id: bool, width: int, on_progress: ProgressCallback = _unheard) -> Iterator[Lines]:
    """Yields all lines of a file, some thousand at a time.

    Args:
        path: Path of the file.
        has_id: True if lines begin with an id.
        width: Largest number of values of a line, without the id.
        on_progress: As `pieces`.

    Raises:
        SnapshotCorrupt: A line is wrong, or the last one is truncated. The message has its number; `offset` is the
            offset of the line in the text.
        SnapshotError: The file cannot be read, or pyarrow is not installed.
    """
    max_lines = max(_MAX_BATCH_VALUES // width, 1)
    rest, offset, number = b"", 0, 1
    for piece in pieces(path, on_progress):
        content = rest + piece
        text = np.frombuffer(content, np.uint8)
        ends = np.flatnonzero(text == _LINE_END) + 1
        begin = 0
        for first in range(0, len(ends), max_lines):
            end = int(ends[first : first + max_lines][-1])
            yield _parsed(path, number + first, offset + begin, text[begin:end], has_id=has_id, width=width)
            begin = end
        rest, offset, number = content[begin:], offset + begin, number + len(ends)
        if len(rest) > _MAX_LINE_BYTES:
            raise corrupt(str(path), f"line {number}: has more than {_MAX_LINE_BYTES} characters", offset)
    if rest:
        raise corrupt(str(path), f"line {number}: it is truncated", offset)


def _parsed(path: Path, number: int, offset: int, text: NDArray[np.uint8], *, has_id: bool, width: int) -> Lines:
    """Parses complete lines, those with the same number of fields together, as CSV."""
    ends = np.flatnonzero(text == _LINE_END)
    lengths = np.diff(ends, prepend=-1)
    spaces = np.flatnonzero(text == _SPACE)
    counts = np.diff(np.searchsorted(spaces, ends), prepend=0) + (not has_id)
    ids, values = np.zeros(len(ends), np.int64), np.zeros((len(ends), width), np.float32)
    try:
        if counts.max() > width:
            raise ValueError(f"a line has {counts.max()} values")
        for count in np.unique(counts).tolist():
            which = counts == count
            columns = _columns(text[np.repeat(which, lengths)], count + has_id, has_id=has_id)
            if has_id:
                ids[which] = columns.pop(0).view(np.int64)
            if columns:
                values[which, :count] = np.stack(columns, axis=1)
    except ValueError as error:
        raise _fault(path, number, offset, text.tobytes(), error, has_id=has_id, width=width) from error
    return Lines(path, number, offset + ends + 1 - lengths, ids, values, counts)


def _columns(text: NDArray[np.uint8], num_fields: int, *, has_id: bool) -> list[NDArray[Any]]:
    """Returns the columns of lines with one number of fields. A number is rounded once, to the nearest float32.

    Raises:
        ValueError: A field is no number.
    """
    pyarrow = arrow("a checkpoint of Paddle")
    types = {str(k): pyarrow.float32() for k in range(num_fields)}
    if has_id:
        types["0"] = pyarrow.uint64()
    table = pyarrow.csv.read_csv(
        pyarrow.BufferReader(text),
        pyarrow.csv.ReadOptions(column_names=list(types), block_size=len(text)),
        pyarrow.csv.ParseOptions(delimiter=" ", quote_char=False, ignore_empty_lines=False),
        pyarrow.csv.ConvertOptions(column_types=types, null_values=[]),
    )
    return [column.to_numpy() for column in table.columns]


def _fault(
    path: Path, number: int, offset: int, text: bytes, error: ValueError, *, has_id: bool, width: int
) -> SnapshotCorrupt:
    """Returns the error for the first wrong line of some lines that could not be parsed."""
    for line in text.split(b"\n")[:-1]:
        if what := _fault_of(line.split(b" "), has_id=has_id, width=width):
            return corrupt(str(path), f"line {number}: {what}", offset)
        number, offset = number + 1, offset + len(line) + 1
    return corrupt(str(path), f"before line {number}: {error}", offset)


def _fault_of(fields: list[bytes], *, has_id: bool, width: int) -> str:
    """Returns what is wrong with a line; empty if nothing is."""
    shown = [repr(field[:_SHOWN_BYTES].decode(errors="replace")) for field in fields]
    if fields == [b""]:
        return "it is empty"
    if has_id and (not _ID.fullmatch(fields[0]) or int(fields[0]) > _MAX_ID):
        return f"{shown[0]} is no id"
    if wrong := [k for k, field in enumerate(fields) if k >= has_id and not _NUMBER.fullmatch(field)]:
        return f"{shown[wrong[0]]} is no number"
    return f"{shown[width + has_id]} is a field too many" if len(fields) > width + has_id else ""


class PaddleRows(NamedTuple):
    """Rows of a sparse table in Paddle's layout; missing values are 0."""

    ids: NDArray[np.int64]
    """`(n,)`."""
    rows: NDArray[np.float32]
    """`(n, dim)`."""
    first_state: NDArray[np.float32]
    """`(n, k)`, the state of the first value; k depends on the rule."""
    other_state: NDArray[np.float32]
    """`(n, k)`, the state of all other values."""
    has_others: NDArray[np.bool_]
    """`(n,)`, whether a row has more than the first value."""
    unseen_days: NDArray[np.uint16]
    """`(n,)`, days since the last push of the id."""


def read_rows(files: TableFiles, layout: Layout, on_progress: ProgressCallback = _unheard) -> Iterator[PaddleRows]:
    """Yields all rows of a sparse table, some thousand at a time, unordered. `on_progress` counts all files together.

    Raises:
        SnapshotCorrupt, SnapshotError: As `lines_of`, or a line does not fit the layout.
    """
    short, full, rule = layout.num_short, layout.num_full, layout.rule.name
    should = f"should be {full}, or {short} without embedx" if full != short else f"should be {full}"
    begins = accumulate(files.sizes, initial=0)
    for path, begin in zip(files.files, begins, strict=False):
        for lines in lines_of(path, has_id=True, width=full, on_progress=after(begin, on_progress)):
            has_others = lines.counts == full
            expected = f"has {{}} numbers behind its id; with rule {rule} of dim {layout.dim} {should}"
            lines.check(has_others | (lines.counts == short), expected)
            unseen = lines.values[:, UNSEEN_DAYS]
            is_count = (unseen >= 0) & (unseen <= _MAX_DAYS) & (unseen == np.floor(unseen))
            lines.check(is_count, f"its second number is not one of days, 0 to {_MAX_DAYS}; has it another accessor?")
            powers = lines.values[:, short - 2 : short] if layout.rule.rule == "adam" else lines.values[:, :0]
            is_power = np.all((powers >= 0) & (powers <= 1), axis=1)
            lines.check(is_power, f"numbers {short - 1} and {short} are no powers of beta; is rule {rule} wrong?")
            others = lines.values[:, short : short + layout.dim - 1]
            yield PaddleRows(
                lines.ids,
                np.concatenate([lines.values[:, FIRST_VALUE : FIRST_VALUE + 1], others], axis=1),
                lines.values[:, FIRST_VALUE + 1 : short],
                lines.values[:, short + layout.dim - 1 :],
                has_others,
                unseen.astype(np.uint16),
            )


def read_dense(files: TableFiles) -> NDArray[np.float32]:
    """Returns a dense table `(n, columns)`: value and moments of the values of each parameter, one after another.

    Raises:
        SnapshotCorrupt, SnapshotError: As `lines_of`, or lines have different numbers of values.
    """
    width = max(files.counts, default=1)
    parts = [np.empty((0, width), np.float32)]
    for path in files.files:
        for lines in lines_of(path, has_id=False, width=width):
            lines.check(lines.counts == width, f"has {{}} numbers, others have {width}")
            parts.append(lines.values)
    return np.concatenate(parts)
