"""Files of JSON with a checksum: written, read, damaged."""

from __future__ import annotations

import json

import msgspec
import pytest

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError
from fleet_sparse.snapshot.checked_json import decode_checked, encode_checked
from fleet_sparse.snapshot.checksum import Checksum


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: float
    parent: Checksum
    version: int = 1
    format: str = "a value"


class NewerValue(Value, frozen=True):
    version: int = 2


class OtherValue(Value, frozen=True):
    format: str = "another value"


VALUE = Value(0.1, Checksum(7))


def test_a_value_is_read_as_it_was_written() -> None:
    assert decode_checked(encode_checked(VALUE), Value, "file") == VALUE


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"1", b"\xff", b"[" * 100_000])
def test_content_without_a_checksum_is_corrupt(content: bytes) -> None:
    with pytest.raises(SnapshotCorrupt):
        decode_checked(content, Value, "file")


def test_a_changed_field_is_corrupt() -> None:
    fields = json.loads(encode_checked(VALUE))
    for changes in ({"number": 0.2}, {"checksum": None}, {"more": 1}, {"number": float("nan")}):
        with pytest.raises(SnapshotCorrupt):
            decode_checked(json.dumps({**fields, **changes}).encode(), Value, "file")


def test_another_version_or_format_is_refused() -> None:
    with pytest.raises(SnapshotError, match="its version is 2, this build reads 1"):
        decode_checked(encode_checked(NewerValue(0.1, Checksum(7))), Value, "file")
    with pytest.raises(SnapshotCorrupt, match="another value"):
        decode_checked(encode_checked(OtherValue(0.1, Checksum(7))), Value, "file")


def test_a_number_that_is_not_finite_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_checked(Value(float("inf"), Checksum(7)))
