"""pyarrow, which reads and writes Parquet and reads Paddle's text. It is an extra of this package."""

from __future__ import annotations

from typing import Any

from fleet_sparse.errors import SnapshotError


def arrow(where: str, instead: str = "") -> Any:
    """Returns the module `pyarrow`, with `csv` and `parquet`.

    Args:
        where: The object that needs it, for the message.
        instead: Ending of the message: a way to do without.

    Raises:
        SnapshotError: It is not installed.
    """
    try:
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet
    except ImportError as error:
        raise SnapshotError(f"{where}: needs pyarrow. Install `fleet-sparse[parquet]`{instead}") from error
    return pyarrow
