"""Hostile snapshots and paths: nothing outside of the root is touched, and what is refused is refused as such."""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash

from fleet_sparse.errors import FleetSparseError, SnapshotError
from fleet_sparse.pserver.admin.root import resolve_under
from fleet_sparse.pserver.admin.snapshot_loader import load
from fleet_sparse.snapshot.directory import MANIFEST, Directory
from fleet_sparse.snapshot.manifest import DELTA, FULL
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.store import SnapshotStore
from support.fuzzing import Cases, flat_memory, mutated_bytes
from support.shards import make_shard
from support.snapshots import random_model, save

FOOTER = struct.Struct("<3Q8s")
MAX_CASE_S = 5.0
HUGE = 1 << 41
"""Bytes of a sparse file, which has almost none on the disk."""
IN_CREATE_TO_MODIFY = 0x00000002 | 0x00000020 | 0x00000100 | 0x00000200 | 0x00000040 | 0x00000080 | 0x00000400
"""Of inotify: modified, opened, made, removed, moved, or removed itself."""


class Watch:
    """Notices whatever is opened, made, changed or removed in directories, by inotify."""

    def __init__(self, *directories: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0
        for directory in directories:
            assert libc.inotify_add_watch(self._fd, os.fsencode(directory), IN_CREATE_TO_MODIFY) >= 0

    def events(self) -> bytes:
        """Returns the events since the last call; empty without any."""
        try:
            return os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._fd)


class Place(NamedTuple):
    """A root with a series of snapshots, and a series that lies outside of it."""

    root: Path
    outside: Path
    series: Path
    """In the root: a full snapshot and a delta of two shards each."""
    original: Path
    """A copy of the series."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    directory = tmp_path_factory.mktemp("place")
    root, outside, original = directory / "root", directory / "outside", directory / "original"
    root.mkdir()
    for where in (original, outside / "model"):
        save(where, random_model(1, 20), 2)
        save(where, random_model(2, 5), 2, kind=DELTA, removed={"sgd": [1, 2]})
    (outside / "secret").write_text("secret")
    return Place(root, outside, root / "model", original)


@pytest.fixture
def watch(place: Place) -> Iterator[Watch]:
    inside = [path for path in place.outside.rglob("*") if path.is_dir()]
    with closing(Watch(place.outside, *inside)) as made:
        yield made


# Changes of the series: each returns True if a pserver must refuse to load it


Change = Callable[[random.Random, Place, Path], bool]
TEXTS = (
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "",
    ".",
    "\0",
    "x" * 300,
    "\ud800",
    "\n",
    "shard-1-of-2.fss",
    "full",
    "delta",
)
NUMBERS = (-1, 0, 1, 2, 3, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, 1e300)
VALUES: tuple[Any, ...] = (*TEXTS, *NUMBERS, None, True, False, [], {}, [[]], float("nan"), float("inf"))


def forged_json(rng: random.Random, value: Any) -> Any:
    """A JSON value with another value somewhere in it, or one removed, repeated or added."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        name = rng.choice(list(value))
        changed = {**value, name: forged_json(rng, value[name])}
        if rng.random() < 0.1:
            del changed[name]
        return changed
    if isinstance(value, list) and value and rng.random() < 0.95:
        index = rng.randrange(len(value))
        changed_list = [*value[:index], forged_json(rng, value[index]), *value[index + 1 :]]
        return rng.choice((changed_list, changed_list, value[:index], [*value, value[index]]))
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice((-1, 1, 64, -64))
    return rng.choice(VALUES)


def sealed_manifest(value: Any) -> bytes:
    """The bytes of a manifest with the right checksum, if it has fields."""
    if not isinstance(value, dict):
        return json.dumps(value).encode()
    fields = {name: each for name, each in value.items() if name != "checksum"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "checksum": xxhash.xxh3_64_hexdigest(text.encode())}).encode()


def a_snapshot(rng: random.Random, series: Path) -> Path:
    return series / rng.choice(("000001-full", "000002-delta"))


def change_manifest(rng: random.Random, place: Place, series: Path) -> bool:
    path = a_snapshot(rng, series) / MANIFEST
    value = json.loads(path.read_bytes())
    path.write_bytes(sealed_manifest(forged_json(rng, value)))
    return False


def change_counts(rng: random.Random, place: Place, series: Path) -> bool:
    path = a_snapshot(rng, series) / MANIFEST
    value = json.loads(path.read_bytes())
    file = rng.choice(value["files"])
    name = rng.choice(("num_bytes", "num_rows", "num_removed", "shard", "checksum"))
    file[name] = "0" * 16 if name == "checksum" else file[name] + rng.choice((1, 2**62, 10**400, 0.25))
    for total in ("num_rows", "num_removed"):
        value[total] = sum(each[total] for each in value["files"])
    path.write_bytes(sealed_manifest(value))
    return True


def change_bytes_of_a_manifest(rng: random.Random, place: Place, series: Path) -> bool:
    path = a_snapshot(rng, series) / MANIFEST
    content = path.read_bytes()
    kind = rng.randrange(5)
    if kind == 0:
        changed = mutated_bytes(rng, content)
    elif kind == 1:
        changed = b"[" * rng.choice((1, 100, 100_000))
    elif kind == 2:
        changed = rng.choice((b"\xff\xfe", b"", b"null", b"NaN", b'{"checksum": NaN}', b'"' + b"9" * 5000, b"9" * 5000))
    elif kind == 3:
        changed = content.replace(b'"num_rows": ', b'"num_rows": NaN, "x": ')
    else:
        changed = content[: rng.randrange(len(content) - 1)]
    path.write_bytes(changed)
    return json_or_none(changed) != json.loads(content)


def json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def change_index(rng: random.Random, place: Place, series: Path) -> bool:
    """The index of a rows file is another one, with the right checksums everywhere."""
    directory = a_snapshot(rng, series)
    path = rng.choice(sorted(directory.glob("*.fss")))
    content = path.read_bytes()
    offset, num_bytes, _, magic = FOOTER.unpack(content[-FOOTER.size :])
    index = json.loads(content[offset : offset + num_bytes])
    kind = rng.randrange(3)
    if kind == 0:
        index = forged_json(rng, index)
    else:  # in the specs, which are JSON of their own
        section = rng.choice([*index["tables"], *index["dense"]])
        spec = forged_json(rng, json.loads(section["spec"]))
        section["spec"] = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    text = json.dumps(index).encode()
    checksum = xxhash.xxh3_64_intdigest(text)
    footer = FOOTER.pack(offset, rng.choice((len(text), len(text), 2**63)), checksum, magic)
    replace_file(path, content[:offset] + text + footer, checksum)
    return False


def replace_file(path: Path, content: bytes, checksum: int) -> None:
    """Writes a rows file, and its size and checksum into the manifest."""
    path.write_bytes(content)
    restate(path, len(content), checksum)


def restate(path: Path, num_bytes: int, checksum: int) -> None:
    manifest = path.parent / MANIFEST
    value = json.loads(manifest.read_bytes())
    for file in value["files"]:
        if file["file"] == path.name:
            file["num_bytes"], file["checksum"] = num_bytes, f"{checksum:016x}"
    manifest.write_bytes(sealed_manifest(value))


def change_bytes_of_rows(rng: random.Random, place: Place, series: Path) -> bool:
    snapshot = a_snapshot(rng, series)
    path = rng.choice(sorted(snapshot.glob("*.fss")))
    content = path.read_bytes()
    changed = mutated_bytes(rng, content)
    path.write_bytes(changed)
    return changed != content and snapshot.name == "000002-delta"  # of the other one dense values are not read


def make_huge(rng: random.Random, place: Place, series: Path) -> bool:
    """A sparse file whose index is said to be almost all of it, or whose entries are."""
    path = rng.choice(sorted(a_snapshot(rng, series).glob("*.fss")))
    content = path.read_bytes()
    offset, num_bytes, checksum, magic = FOOTER.unpack(content[-FOOTER.size :])
    if rng.random() < 0.5:
        begin = rng.choice((128, offset))
        tail = FOOTER.pack(begin, HUGE - begin - FOOTER.size, checksum, magic)
    else:
        index = json.loads(content[offset : offset + num_bytes])
        table = rng.choice(index["tables"])
        size = rng.choice((48 * 2**20, 48 * 2**33))
        table["entries"]["num_bytes"] = size
        table["num_rows_blocks"] = size // 48
        table["num_rows"] = rng.choice((size // 48, 2**50))
        text = json.dumps(index).encode()
        checksum = xxhash.xxh3_64_intdigest(text)
        begin = HUGE - FOOTER.size - len(text)
        tail = text + FOOTER.pack(begin, len(text), checksum, magic)
    with path.open("r+b") as file:
        file.truncate(HUGE - len(tail))
        file.seek(HUGE - len(tail))
        file.write(tail)
    restate(path, HUGE, checksum)
    return True


def change_files(rng: random.Random, place: Place, series: Path) -> bool:
    """A file or directory is a link, a device, a pipe, a socket or a directory."""
    snapshot = a_snapshot(rng, series)
    victim = rng.choice((snapshot / MANIFEST, rng.choice(sorted(snapshot.glob("*.fss"))), snapshot))
    other = place.outside / "model" / victim.relative_to(series)
    if victim.is_dir():
        shutil.rmtree(victim)
    else:
        victim.unlink()
    kind = rng.randrange(8)
    if kind == 0:
        victim.symlink_to(other)
    elif kind == 1:
        victim.symlink_to(os.path.relpath(other, victim.parent))
    elif kind == 2:
        victim.symlink_to(victim.name)
    elif kind == 3:
        victim.symlink_to(place.outside / "new")
    elif kind == 4:
        os.mkfifo(victim)
    elif kind == 5:
        with socket.socket(socket.AF_UNIX) as made, suppress(OSError):
            made.bind(str(victim))
    elif kind == 6:
        with suppress(PermissionError):
            os.mknod(victim, stat.S_IFCHR | 0o666, os.makedev(1, rng.choice((3, 5, 8))))  # null, zero or random
    else:
        victim.mkdir()
        return victim != snapshot  # else it is as if there was none
    return os.path.lexists(victim)


def add_snapshots(rng: random.Random, place: Place, series: Path) -> bool:
    """More snapshots, which are links, loops, or have odd names."""
    kind = rng.randrange(5)
    if kind == 0:
        (series / "000003-full").symlink_to(place.outside / "model" / "000001-full")
        return True
    if kind == 1:
        shutil.copytree(series / "000002-delta", series / "000003-delta")  # that of another number
        return True
    if kind == 2:  # a base of itself, or of another
        path = series / "000002-delta" / MANIFEST
        value = json.loads(path.read_bytes())
        number = rng.choice((1, 2, 2**62))
        value["base"] = {"number": number, "kind": rng.choice((FULL, DELTA)), "checksum": "0" * 16}
        path.write_bytes(sealed_manifest(value))
        return True
    if kind == 3:
        os.mkdir(os.fsencode(series) + b"/\xff\xfe-full")
        (series / "000003-full\n").mkdir()
        (series / ("9" * 200 + "-full")).mkdir()
        return False
    shutil.copytree(series / "000001-full", series / "000001-delta")
    return True


CHANGES: list[Change] = [
    change_manifest,
    change_counts,
    change_bytes_of_a_manifest,
    change_index,
    change_bytes_of_rows,
    make_huge,
    change_files,
    add_snapshots,
]


def uses(root: Path) -> list[Callable[[], object]]:
    """What reads or writes a series: pservers, commands and saves."""

    def load_part() -> None:
        with closing(make_shard(shard=0, num_shards=3)) as shard:
            load(shard, resolve_under(str(root), "model"))

    def save_delta() -> None:
        store = SnapshotStore(resolve_under(str(root), "model"))
        plan = store.plan(DELTA, "hostile")
        store.abandon(plan, "hostile")

    def keep_one() -> None:
        save(root / "model", random_model(3, 3), 1)

    return [load_part, lambda: read_all(root / "model"), save_delta, keep_one]


def read_all(series: Path) -> None:
    """Reads all that is in the newest snapshot, as commands do."""
    with open_content(str(series)) as content:
        for name in content.tables:
            for _ in content.rows(name):
                pass
        for name in content.dense:
            content.dense_values(name)


@pytest.mark.cases(64, 1_000)
def test_hostile_snapshots_touch_nothing_outside(cases: Cases, place: Place, watch: Watch) -> None:
    rng = cases.rng
    num_refused, longest_s = 0, 0.0
    with ExitStack() as stack:
        for number in range(cases.num_cases):
            if number == len(CHANGES):  # the first ones load kernels
                stack.enter_context(flat_memory())
            shutil.copytree(place.original, place.series)
            change = CHANGES[number % len(CHANGES)]
            must_refuse = change(rng, place, place.series)
            watch.events()  # of the change itself
            outcomes = []
            for use in uses(place.root):
                begun_at = time.monotonic()
                try:
                    use()
                    outcomes.append("")
                except FleetSparseError as error:
                    outcomes.append(type(error).__name__)
                longest_s = max(longest_s, time.monotonic() - begun_at)
            assert outcomes[1] or not must_refuse, (change, number)  # a pserver reads its part only
            assert watch.events() == b"", (change, number)
            assert longest_s < MAX_CASE_S, (change, number)
            num_refused += bool(outcomes[1])
            shutil.rmtree(place.series)
    assert num_refused > cases.num_cases * 0.7
    cases.report(refused=num_refused, longest_ms=round(1000 * longest_s))


# Paths


PIECES = (
    *("..", ".", "", "a", "model", "out", "loop", "in", "~", "x" * 255, "x" * 256, "\0", "\n", " ", "ü", "%2e%2e"),
    *(
        "..\\",
        "....",
        "\u2025",
        "\ud800",
        "etc",
        "passwd",
        "proc",
        "self",
        "fd",
        "secret",
        "000001-full",
        "file:",
        "s3:",
    ),
)


def hostile_path(rng: random.Random, place: Place) -> str:
    begin = rng.choice(
        ("", "", "", "/", "//", "file://", "file:///", "s3://", "memory://", f"{place.root}/", str(place.outside))
    )
    return begin + "/".join(rng.choice(PIECES) for _ in range(rng.choice((1, 2, 3, 5, 2000))))


@pytest.mark.cases(1_000, 20_000)
def test_hostile_paths_stay_under_the_root(cases: Cases, place: Place, watch: Watch) -> None:
    rng, num_refused = cases.rng, 0
    (place.root / "out").symlink_to(place.outside)
    (place.root / "loop").symlink_to("loop")
    (place.root / "inside").mkdir()
    (place.root / "in").symlink_to("inside")
    try:
        for _ in range(cases.num_cases):
            dirname = hostile_path(rng, place)
            try:
                directory: Directory = resolve_under(str(place.root), dirname)
                assert Path(str(directory)).is_relative_to(place.root)
                SnapshotStore(directory).snapshots()
                if rng.random() < 0.05:
                    store = SnapshotStore(directory)
                    store.abandon(store.plan(FULL, "x"), "x")
            except SnapshotError:
                num_refused += 1
            assert watch.events() == b"", dirname
    finally:
        for path in place.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    assert num_refused > cases.num_cases / 10
    cases.report(refused=num_refused)
