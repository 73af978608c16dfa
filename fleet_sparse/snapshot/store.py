"""SnapshotStore: the numbered snapshots in one directory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

from fleet_sparse.core.version import Version
from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

from . import serve_file
from .directory import MANIFEST, Directory, FileLock, corrupt, read
from .manifest import DELTA, FULL, MAX_BYTES, Base, Manifest, checked_save_id, snapshot_name, version_of
from .open_snapshot import open_file
from .serve_file import read_serve_file

_log = logging.getLogger(__name__)
_NAME = re.compile(rf"(\d{{6}}|[1-9]\d{{6,}})-({FULL}|{DELTA})", re.ASCII)
_DRAFT = ".saving-"
_LOCK = ".lock"

_locks: dict[str, FileLock] = {}
"""Locks of the drafts of this process, by their path. A draft whose lock no process holds is abandoned."""


class Plan(NamedTuple):
    """A snapshot that is being written."""

    number: int
    kind: str
    base: Base | None
    """None for a full snapshot."""

    @property
    def name(self) -> str:
        """Name of its directory."""
        return snapshot_name(self.number, self.kind)


class SnapshotStore:
    """The snapshots in a directory. `docs/snapshot.md` says what a crash leaves behind.

    Every method raises SnapshotError if the system refuses, and SnapshotCorrupt if a manifest that it reads is wrong.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def snapshots(self) -> list[str]:
        """Returns the names of all complete snapshots, by number.

        Raises:
            SnapshotError: Two have the same number.
        """
        names = [name for name in self._numbered() if MANIFEST in self._directory.child(name).names()]
        for name, following in pairwise(names):
            if _number(name) == _number(following):
                raise SnapshotError(
                    f"{self}: it has {name} and {following}, with one number. Move one of them elsewhere"
                )
        return names

    def newest_with(self, tables: Collection[str] = ()) -> str | None:
        """Returns the name of the newest snapshot with these tables, or with all if none is named; None without one."""
        for name in reversed(self.snapshots()):
            manifest = self.manifest(name)
            if manifest.is_complete or (tables and set(tables) <= set(manifest.tables)):
                return name
        return None

    def with_number(self, number: int) -> str:
        """Returns the name of the snapshot with a number.

        Raises:
            SnapshotError: There is none; the message says whether it was removed.
        """
        names = self.snapshots()
        found = next((name for name in names if _number(name) == number), None)
        if found is None:
            numbers = ", ".join(str(_number(name)) for name in names) or "none"
            was_removed = 0 < number < max(map(_number, names), default=0)
            why = "was removed, or its save was not finished" if was_removed else "does not exist"
            raise SnapshotError(f"{self}: snapshot {number} {why}; there are {numbers}")
        return found

    def find(self, version: Version) -> str | None:
        """Returns the name of the snapshot that is a version; None if it is not there any more."""
        for name in self.snapshots():
            if _number(name) == version.number and version_of(self.manifest(name)).checksum == version.checksum:
                return name
        return None

    def served(self) -> str | None:
        """Returns the name of the snapshot that readers serve: the one that `SERVE.json` names, otherwise the newest of
        all tables; None without one.

        Raises:
            SnapshotError: The one that `SERVE.json` names is not there.
            SnapshotCorrupt: `SERVE.json` is damaged.
        """
        pinned = read_serve_file(self._directory).pinned
        if pinned is None:
            return self.newest_with()
        name = self.find(pinned)
        if name is None:
            raise SnapshotError(
                f"{self}/{serve_file.NAME}: snapshot {pinned.number} ({pinned.checksum:016x}), which it names, is not "
                "there. Write fleet-sparse version promote with another one, or unpin"
            )
        return name

    def manifest(self, name: str) -> Manifest:
        """Returns the manifest of a snapshot.

        Raises:
            SnapshotError: It has none, or one with another number or kind.
        """
        directory = self._directory.child(name)
        if MANIFEST not in directory.names():
            raise SnapshotError(
                f"{directory}: it has no {MANIFEST}; nothing was saved there, or the save was not finished"
            )
        path = f"{directory}/{MANIFEST}"
        manifest = Manifest.parse(read(directory, MANIFEST, MAX_BYTES), path)
        if manifest.name != name:
            raise SnapshotError(f"{path}: it is the manifest of {manifest.name}. Rename the directory")
        return manifest

    def chain(self, name: str | None = None) -> list[tuple[Directory, Manifest]]:
        """Returns the chain of a snapshot: a full one first, then each delta.

        Args:
            name: Name of the last snapshot; None for the newest, whether it has all tables or not.

        Raises:
            SnapshotError: There is none, or the chain has a gap.
        """
        if name is None:
            name = next(reversed(self.snapshots()), None)
        if name is None:
            raise SnapshotError(f"{self}: it has no snapshot; nothing was saved there, or no save was finished")
        chain = [self.manifest(name)]
        while (base := chain[-1].base) is not None:
            chain.append(self._base_of(chain[-1], base))
        return [(self._directory.child(manifest.name), manifest) for manifest in reversed(chain)]

    def plan(self, kind: str, save_id: str) -> Plan:
        """Plans the next snapshot and creates the directory for its files. `commit` or `abandon` follows.

        Args:
            kind: `FULL` or `DELTA`; without a possible base, a delta becomes a full snapshot.
            save_id: Id of the save.

        Raises:
            SnapshotError: The directory is a snapshot itself.
        """
        if MANIFEST in self._directory.names():
            raise SnapshotError(f"{self}: it is one snapshot, should be a directory for several. Name its parent")
        names = self._numbered()
        number = 1 + max(map(_number, names), default=0)
        base = self._new_base() if kind == DELTA else None
        plan = Plan(number, FULL if base is None else DELTA, base)
        target = self.target(plan, save_id)
        if self._directory.renames:
            self._directory.make()
            lock = self._directory.lock(target.name + _LOCK, create=True)
            if lock is None:
                _log.warning("%s: cannot be locked; another job that saves here may remove it", target)
            else:
                _locks[str(target)] = lock
        target.make()
        return plan

    def target(self, plan: Plan, save_id: str) -> Directory:
        """Returns the directory for the files of a planned snapshot."""
        draft = _DRAFT + checked_save_id(save_id)
        return self._directory.child(draft if self._directory.renames else plan.name)

    def commit(
        self,
        plan: Plan,
        manifest: Manifest,
        keep_last: int | None = None,
        is_own: Callable[[int], bool] = lambda number: True,
    ) -> str:
        """Makes the written files a snapshot, then removes old snapshots. Everything is read back before it counts.

        Args:
            plan: The plan of the snapshot.
            manifest: Names the files.
            keep_last: How many full snapshots of all tables to keep, each with its deltas; None for all.
            is_own: Returns whether the saver may remove the snapshot with a number. Others stay, and do not count.

        Returns:
            The name of the snapshot.

        Raises:
            SnapshotError: A file is missing, has another size or cannot be read, the manifest does not fit the plan or
                cannot be read, or the system refused. Nothing else changed.
            ValueError: `keep_last` is below 1.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, should be None or at least 1")
        target = self.target(plan, manifest.save_id)
        self._check(plan, manifest, target)
        content = manifest.to_json()
        Manifest.parse(content, f"{target}/{MANIFEST}")
        _check_readable(target, manifest)
        target.put(MANIFEST, content)
        target.sync()
        if read(target, MANIFEST, MAX_BYTES) != content:
            raise corrupt(f"{target}/{MANIFEST}", "it is not what was written", 0)
        if self._directory.renames:
            self._directory.rename_child(target.name, plan.name)
        self._unlock(target)
        self._remove_old(plan, keep_last, is_own)
        return plan.name

    def abandon(self, plan: Plan, save_id: str) -> None:
        """Removes what was written for a snapshot unless it was committed.

        Raises nothing; failures are logged.
        """
        target = self.target(plan, save_id)
        try:
            if not self._directory.renames and MANIFEST in target.names():
                self.manifest(plan.name)
                return
        except SnapshotCorrupt:
            pass
        except SnapshotError as error:
            _log.warning("cannot see whether %s is a snapshot, so it stays: %s", target, error)
            return
        self._remove(target.name)
        self._unlock(target)

    def _numbered(self) -> list[str]:
        """Returns the names of all snapshots by number, incomplete ones included."""
        return sorted(filter(_NAME.fullmatch, self._directory.names()), key=lambda name: (_number(name), name))

    def _base_of(self, manifest: Manifest, base: Base) -> Manifest:
        where = f"{self._directory.child(manifest.name)}"
        if MANIFEST not in self._directory.child(base.name).names():
            raise SnapshotError(f"{where}: its base {base.name} is missing. Load a snapshot whose base exists")
        found = self.manifest(base.name)
        if found.checksum != base.checksum or not found.is_complete:
            raise SnapshotError(
                f"{where}: its base {base.name} should have checksum {base.checksum}, the one that exists has "
                f"{found.checksum}"
            )
        return found

    def _new_base(self) -> Base | None:
        try:
            name = self.newest_with()
            if name is None:
                return None
            _, manifest = self.chain(name)[-1]
        except SnapshotError as error:
            _log.warning("%s: has no usable base, so a full snapshot is saved: %s", self, error)
            return None
        return Base(manifest.number, manifest.kind, manifest.checksum)

    def _check(self, plan: Plan, manifest: Manifest, target: Directory) -> None:
        fault = manifest.fault()
        if fault is None and (manifest.number, manifest.kind, manifest.base) != plan:
            fault = f"the manifest is that of {manifest.name} with base {manifest.base}, the plan is {plan}"
        if fault is not None:
            raise SnapshotError(f"{target}: {fault}")
        for file in manifest.files:
            try:
                num_bytes = target.size_of(file.file)
            except SnapshotError as error:
                raise SnapshotError(
                    f"{error}. This pserver finishes the save; all pservers should save to one directory"
                ) from error
            if num_bytes != file.num_bytes:
                raise SnapshotError(
                    f"{target}/{file.file}: it has {num_bytes} bytes, its pserver wrote {file.num_bytes} bytes"
                )

    def _remove_old(self, plan: Plan, keep_last: int | None, is_own: Callable[[int], bool]) -> None:
        """Removes old snapshots and what abandoned saves left. Saves of other jobs that are under way stay."""
        try:
            complete = self.snapshots()
            own = [name for name in complete if is_own(_number(name)) or name == plan.name]
            first = 0 if keep_last is None else self._first_kept(own, keep_last)
            held = set() if keep_last is None else self._held()
            old = [name for name in self._numbered() if _number(name) < plan.number]
            # Newest first, so that each remaining snapshot has its base.
            for name in reversed(old):
                # Where directories are renamed, an incomplete snapshot is one that was being removed. Elsewhere it may
                # be a save of another job that is under way.
                is_remnant = name not in complete and (self._directory.renames or is_own(_number(name)))
                if is_remnant or (name in own and _number(name) < first and name not in held):
                    self._remove(name)
            self._remove_abandoned()
        except SnapshotError as error:
            _log.warning("cannot see what to remove from %s: %s", self, error)

    def _held(self) -> set[str]:
        """Returns the names of the snapshots that readers serve or may return to, and of those below them."""
        content = read_serve_file(self._directory)
        versions = [version for version in (content.pinned, content.way_back) if version is not None]
        names = [name for name in map(self.find, versions) if name is not None]
        return {directory.name for name in names for directory, _ in self.chain(name)}

    def _remove_abandoned(self) -> None:
        """Removes the drafts of processes that died, whose locks nobody holds, and other drafts of this process.

        A process has one save at a time, so its other drafts are those of saves that it gave up.
        """
        for name in self._directory.names():
            if name.startswith(_DRAFT) and name.endswith(_LOCK):
                draft = self._directory.child(name.removesuffix(_LOCK))
                lock = _locks.pop(str(draft), None) or self._directory.lock(name, create=False)
                if lock is not None:
                    self._remove(draft.name)
                    lock.release()

    def _unlock(self, target: Directory) -> None:
        lock = _locks.pop(str(target), None)
        if lock is not None:
            lock.release()

    def _first_kept(self, own: list[str], keep_last: int) -> int:
        """Returns the number of the oldest snapshot that is kept."""
        num_full = 0
        for name in reversed(own):
            if name.endswith(FULL):
                num_full += self.manifest(name).is_complete
            if num_full == keep_last:
                return _number(name)
        return 0

    def _remove(self, name: str) -> None:
        try:
            self._directory.remove_child(name)
        except SnapshotError as error:
            _log.warning("cannot remove %s: %s", self._directory.child(name), error)


def is_snapshot(where: Directory) -> bool:
    """Returns whether a directory is one snapshot, and not one for several."""
    return _NAME.fullmatch(where.name) is not None or MANIFEST in where.names()


def served_chain(where: Directory) -> list[tuple[Directory, Manifest]]:
    """Returns `SnapshotStore.chain` of the snapshot that readers of a series serve, or of the snapshot that it is.

    Raises:
        SnapshotError: As `SnapshotStore.chain` and `SnapshotStore.served`.
    """
    if is_snapshot(where):
        return open_chain(where)
    store = SnapshotStore(where)
    return store.chain(store.served())


def open_chain(where: Directory, tables: Collection[str] = ()) -> list[tuple[Directory, Manifest]]:
    """Returns `SnapshotStore.chain` of the newest snapshot in a directory, or of the snapshot that the directory is.

    Args:
        where: The directory.
        tables: Names of the wanted tables; empty for all. The newest snapshot is the newest one that has them, or just
            the newest one if none has.

    Raises:
        SnapshotError: As `SnapshotStore.chain`.
    """
    if is_snapshot(where):
        return SnapshotStore(where.parent()).chain(where.name)
    store = SnapshotStore(where)
    return store.chain(store.newest_with(tables))


def _check_readable(target: Directory, manifest: Manifest) -> None:
    """Opens each file of a snapshot and checks its index, and that each dense array has values in all files or in none.

    Raises:
        SnapshotError: One cannot be read, or the files do not fit together.
    """
    is_assigned: dict[str, bool] = {}
    for expected in manifest.files:
        with closing(open_file(target, manifest, expected)) as file:
            for dense in file.dense:
                if is_assigned.setdefault(dense.spec.name, dense.assigned) != dense.assigned:
                    raise SnapshotError(
                        f"{target}: dense {dense.spec.name!r} has values on some shards only. Save again when all have "
                        "received their first values"
                    )


def _number(name: str) -> int:
    return int(name.partition("-")[0])
