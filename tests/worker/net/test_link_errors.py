"""Which error a client raises for the code with which a pserver refused its request."""

from __future__ import annotations

import pytest

from fleet_sparse.errors import ErrorCode, FleetSparseError, ProtocolError, PushRefused, TableMismatch
from fleet_sparse.worker.net.link_errors import LinkErrors


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.READ_ONLY, PushRefused),
        (ErrorCode.NOT_FINITE, PushRefused),
        (ErrorCode.SCHEMA, TableMismatch),
        (ErrorCode.VERSION_GONE, ProtocolError),
    ],
)
def test_each_code_has_its_error(code: ErrorCode, kind: type[FleetSparseError]) -> None:
    error = LinkErrors(2, "10.0.0.1:6180").refused(code, "table 'items'")
    assert type(error) is kind
    assert str(error).startswith("shard 2 at 10.0.0.1:6180: table 'items'")
