"""Lines of data sets with an integer slot and a float slot, as lists."""

from __future__ import annotations

import numpy as np

from fleet_sparse.plugin.datasets.lines import Lines, Origin

Rows = list[tuple[list[int], list[float]]]


def made(rows: Rows, path: str = "file", number: int = 1) -> Lines:
    """Lines with an integer slot and a float slot."""
    starts = [np.cumsum([0, *(len(row[kind]) for row in rows)]) for kind in (0, 1)]
    return Lines(
        2,
        np.array([len(values) for row in rows for values in row], np.int32),
        starts[0],
        np.array([value for row in rows for value in row[0]], np.int64),
        starts[1],
        np.array([value for row in rows for value in row[1]], np.float32),
        (Origin(0, path, number),),
    )


def rows_of(lines: Lines) -> Rows:
    assert lines.counts.tolist() == [
        int(size) for pair in zip(np.diff(lines.id_starts), np.diff(lines.float_starts), strict=True) for size in pair
    ]
    return [
        (
            lines.ids[lines.id_starts[line] : lines.id_starts[line + 1]].tolist(),
            lines.floats[lines.float_starts[line] : lines.float_starts[line + 1]].tolist(),
        )
        for line in range(lines.num_lines)
    ]
