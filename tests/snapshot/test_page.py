"""docs/snapshot.md says what the code does: its tables, its example and its program are read here."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import VERSION, Manifest
from fleet_sparse.snapshot.rows_format import ENTRY, FOOTER_BYTES, HEADER_BYTES
from fleet_sparse.snapshot.store import SnapshotStore
from support.rows_files import TABLE, Table, dense_of, everything_in, manifest_of, opened_bytes, rows_of, write
from support.snapshot_example import DENSE, ROWS, STATES, VALUES, example_file, example_manifest
from support.snapshot_example import TABLE as EXAMPLE_TABLE

PAGE = (Path(__file__).parents[2] / "docs" / "snapshot.md").read_text()
SIZES = {"u32": 4, "u64": 8, "8 bytes": 8}
ADAM = TableSpec(name="adam", dim=5, rule="adam", initializer=constant(0.0))


def section(heading: str) -> str:
    return re.split(r"^#+ ", PAGE.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def blocks(kind: str, heading: str) -> list[str]:
    """What stands between the fences of that kind under a heading."""
    return re.findall(rf"```{kind}\n(.*?)```", section(heading), re.DOTALL)


def dumped() -> list[tuple[int, bytes, str]]:
    """Offset, bytes and note of each line of the example."""
    (text,) = blocks("file shard-0-of-1.fss", "A worked example")
    return [(int(line[:4], 16), bytes.fromhex(line[6:53]), line[55:]) for line in text.splitlines()]


def bytes_at(note: str) -> bytes:
    (found,) = (data for _, data, what in dumped() if what.startswith(note))
    return found


# The example


def test_the_file_is_what_the_writer_makes_of_it() -> None:
    content, _ = example_file()
    assert b"".join(data for _, data, _ in dumped()) == content


def test_the_lines_follow_one_another() -> None:
    at = 0
    for offset, data, _ in dumped():
        assert offset == at
        at += len(data)


def test_the_manifest_is_what_the_code_makes_of_it() -> None:
    (text,) = blocks("json", "A worked example")
    assert text.encode() == example_manifest().to_json()
    assert Manifest.parse(text.encode(), "MANIFEST.json") == example_manifest()


def test_the_file_reads_as_the_page_says() -> None:
    content = b"".join(data for _, data, _ in dumped())
    file = opened_bytes(content, example_file()[1])
    found = everything_in(file)
    columns = {name: array.tobytes() for name, array in ROWS.columns.items()}
    assert found.tables["C1"] == (EXAMPLE_TABLE, 9, 0, ROWS.ids.tobytes(), columns, b"")
    assert found.dense["dense"] == (DENSE, 9, (0, 3, True), VALUES.tobytes(), STATES.tobytes())


def test_the_notes_are_the_bytes_beside_them() -> None:
    numbers = {
        "format version 4": VERSION,
        "bytes of this header 64": HEADER_BYTES,
        "cluster id 0xc0ffee": 0xC0FFEE,
        "buckets 16384": 16384,
        "rows block: id 7": 7,
        "id -1": 2**64 - 1,
        "entry: offset 64": 64,
        "bytes 48": 48,
        "ids 2": 2,
        "footer: index offset 256": 256,
        "index bytes 922": 922,
    }
    assert {note: int.from_bytes(bytes_at(note), "little") for note in numbers} == numbers


def test_the_values_are_the_bytes_beside_them() -> None:
    values = {
        "row of id 7: ": ROWS.rows[0],
        "row of id -1: ": ROWS.rows[1],
        "state of id 7: ": ROWS.states[0],
        "state of id -1: ": ROWS.states[1],
        "dense block: values ": VALUES,
        "states ": STATES,
    }
    for note, expected in values.items():
        assert bytes_at(note + ", ".join(map(str, expected.ravel().tolist()))) == expected.tobytes()


def test_the_hashes_are_those_of_the_page() -> None:
    # The formula of the page, with Python's integers.
    mask = 2**64 - 1
    for id_ in (7, -1):
        x = ((id_ & mask) ^ xxhash.xxh3_64_intdigest(b"C1")) + 0x9E3779B97F4A7C15 & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        assert (x ^ x >> 31).to_bytes(8, "little") == bytes_at(f"hash of id {id_}")


def test_the_checksums_are_those_of_the_page() -> None:
    content, told = example_file()
    checksums = {
        "checksum of bytes 0 to 55": content[:56],
        "checksum of bytes 64 to 127": content[64:128],
        "checksum of the index": content[256:1178],
    }
    for note, data in checksums.items():
        assert bytes_at(note) == xxhash.xxh3_64_digest(data)[::-1]
    index = json.loads(content[256:1178])
    assert index["tables"][0]["entries"]["checksum"] == xxhash.xxh3_64_hexdigest(content[128:192])
    assert index["dense"][0]["block"]["checksum"] == xxhash.xxh3_64_hexdigest(content[192:256])
    assert told.checksum == xxhash.xxh3_64_intdigest(content[256:1178])


# The tables and the JSON


@pytest.mark.parametrize(
    ("heading", "first", "num_bytes"),
    [
        ("Header", "offset | type", HEADER_BYTES),
        ("Blocks", "offset | type", 48),
        ("Footer", "offset from", FOOTER_BYTES),
    ],
)
def test_the_fields_follow_one_another_without_gaps(heading: str, first: str, num_bytes: int) -> None:
    text = section(heading).split(f"| {first}", 1)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:] if line.startswith("|")]
    offset = 0
    for row in rows:
        assert int(row[0]) == offset
        offset += SIZES[row[1]]
    assert offset == num_bytes


def test_an_entry_lies_as_the_page_says() -> None:
    assert [ENTRY.fields[name][1] for name in ENTRY.names or ()] == list(range(0, 48, 8))  # type: ignore[index]


def keys_of(value: Any) -> Any:
    """The same with keys in place of values."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items()}
    return [keys_of(value[0])] if isinstance(value, list) and value else None


def test_the_index_has_the_fields_of_the_page() -> None:
    (text,) = blocks("json", "Index")
    content, _ = example_file()
    assert json.dumps(keys_of(json.loads(text))) == json.dumps(keys_of(json.loads(content[256:1178])))


def test_the_manifest_has_the_fields_of_the_page() -> None:
    (text,) = blocks("json", "The manifest")
    shown, written = json.loads(text), json.loads(example_manifest().to_json())
    assert shown["version"] == VERSION
    assert list(shown) == list(written)
    for name in ("files", "workers"):
        assert list(shown[name][0]) == list(written[name][0])
    assert list(shown["files"][0]["clients"][0]) == list(written["files"][0]["clients"][0])


# The program


def program() -> str:
    (text,) = blocks("python", "Reading")
    return text


def test_the_program_needs_numpy_alone_and_about_30_lines() -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(program()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"json", "math", "struct", "pathlib", "numpy"}
    assert len([line for line in program().splitlines() if line.strip()]) <= 40


def owned(spec: TableSpec, shard: int, count: int) -> list[int]:
    """The first ids of one of two shards."""
    ids = np.arange(3 * count)
    return ids[Placement.even(2).shard_of(ids, spec.salt) == shard][:count].tolist()


def test_the_program_reads_every_row_of_the_newest_full_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    series = SnapshotStore(directory_at(tmp_path / "model"))
    for number in (1, 2):
        plan = series.plan("full", "one")
        files = []
        for shard in range(2):
            tables = [
                Table(TABLE, rows_of(TABLE, owned(TABLE, shard, 50 * number), days=number), days=number),
                Table(ADAM, rows_of(ADAM, owned(ADAM, shard, 20_000 * number), seed=shard)),
            ]
            file = series.target(plan, "one").create(f"shard-{shard}-of-2.fss")
            files.append(write(file, tables, [dense_of(DENSE, 0, 3)], shard=shard, num_shards=2))
        series.commit(plan, manifest_of(plan, files))

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(program(), "docs/snapshot.md", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) > 4

    for spec, count in ((TABLE, 100), (ADAM, 40_000)):
        for shard, ids in enumerate([owned(spec, shard, count) for shard in (0, 1)]):
            found: list[tuple[Any, ...]] = [
                arrays
                for name, *arrays in names["tables_of"](f"model/000002-full/shard-{shard}-of-2.fss")
                if name == spec.name
            ]
            expected = rows_of(spec, ids, days=2 if spec is TABLE else 0, seed=shard if spec is ADAM else 0)
            np.testing.assert_array_equal(np.concatenate([ids for ids, _ in found]), expected.ids)
            for name, array in expected.columns.items():
                np.testing.assert_array_equal(np.concatenate([columns[name] for _, columns in found]), array)
