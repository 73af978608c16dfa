"""SnapshotStore: the numbered snapshots of one directory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import NamedTuple

from fleet_sparse.errors import SnapshotCorrupt, SnapshotError

from .directory import MANIFEST, Directory, read
from .manifest import DELTA, FULL, MAX_BYTES, Base, Manifest, checked_save_id, snapshot_name

_log = logging.getLogger(__name__)
_NAME = re.compile(rf"(\d{{6}}|[1-9]\d{{6,}})-({FULL}|{DELTA})", re.ASCII)
_DRAFT = ".saving-"


class Plan(NamedTuple):
    """A snapshot that is to be written."""

    number: int
    kind: str
    base: Base | None
    """None for a full one."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return snapshot_name(self.number, self.kind)


class SnapshotStore:
    """The snapshots in a directory. One save at a time writes to it; `docs/snapshot.md` says what a crash leaves.

    Every method raises SnapshotError if the system refuses, and SnapshotCorrupt if a manifest that it reads is wrong.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def snapshots(self) -> list[str]:
        """The names of all that are complete, by number.

        Raises:
            SnapshotError: Two have one number.
        """
        names = [name for name in self._numbered() if MANIFEST in self._directory.child(name).names()]
        for name, following in pairwise(names):
            if _number(name) == _number(following):
                raise SnapshotError(f"{self}: it has {name} and {following}. Move one of the two elsewhere")
        return names

    def newest_with(self, tables: Collection[str] = ()) -> str | None:
        """The name of the newest snapshot that has these tables, or without any named, all; None if there is none."""
        for name in reversed(self.snapshots()):
            manifest = self.manifest(name)
            if manifest.is_whole or (tables and set(tables) <= set(manifest.tables)):
                return name
        return None

    def manifest(self, name: str) -> Manifest:
        """The manifest of the snapshot with that name.

        Raises:
            SnapshotError: It has none, or one of another number or kind.
        """
        directory = self._directory.child(name)
        if MANIFEST not in directory.names():
            raise SnapshotError(
                f"{directory}: it has no {MANIFEST}; nothing was saved there, or the save did not come to its end"
            )
        path = f"{directory}/{MANIFEST}"
        manifest = Manifest.parse(read(directory, MANIFEST, MAX_BYTES), path)
        if manifest.name != name:
            raise SnapshotError(f"{path}: it is that of {manifest.name}. Give the directory that name")
        return manifest

    def chain(self, name: str | None = None) -> list[tuple[Directory, Manifest]]:
        """The snapshots that make up one: a full one first, then each delta on top of it.

        Args:
            name: Of the last; None for the newest, whether it has all tables or not.

        Raises:
            SnapshotError: There is none, or the chain has a gap.
        """
        if name is None:
            name = next(reversed(self.snapshots()), None)
        if name is None:
            raise SnapshotError(f"{self}: it has no snapshot; nothing was saved there, or no save came to its end")
        chain = [self.manifest(name)]
        while (base := chain[-1].base) is not None:
            chain.append(self._base_of(chain[-1], base))
        return [(self._directory.child(manifest.name), manifest) for manifest in reversed(chain)]

    def plan(self, kind: str, save_id: str) -> Plan:
        """What comes next, with the directory made that its files are written to.

        Args:
            kind: `FULL` or `DELTA`; a delta without anything that it could be on top of becomes a full one.
            save_id: Of the save.

        Raises:
            SnapshotError: The directory is a snapshot itself.
        """
        if MANIFEST in self._directory.names():
            raise SnapshotError(f"{self}: it is one snapshot, should be a directory for several. Name the one it is in")
        names = self._numbered()
        number = 1 + max(map(_number, names), default=0)
        base = self._new_base() if kind == DELTA else None
        plan = Plan(number, FULL if base is None else DELTA, base)
        self.target(plan, save_id).make()
        return plan

    def target(self, plan: Plan, save_id: str) -> Directory:
        """The directory that the files of a planned snapshot are written to."""
        draft = _DRAFT + checked_save_id(save_id)
        return self._directory.child(draft if self._directory.renames else plan.name)

    def commit(
        self,
        plan: Plan,
        manifest: Manifest,
        keep_last: int | None = None,
        is_own: Callable[[int], bool] = lambda number: True,
    ) -> str:
        """Makes files that are there a snapshot, then removes those that are kept no more.

        Args:
            plan: Of the snapshot.
            manifest: Names the files.
            keep_last: How many full snapshots of all tables to keep, each with the deltas on top of it; None for all.
            is_own: Of the number of a snapshot, whether it is the saver's to remove. Others stay, and do not count.

        Returns:
            The name of the snapshot.

        Raises:
            SnapshotError: A file is missing or has another size, the manifest is not one of the plan, or the system
                refused. The snapshots that were there stand.
            ValueError: Of `keep_last` below 1.
        """
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}, should be None or at least 1")
        target = self.target(plan, manifest.save_id)
        self._check(plan, manifest, target)
        target.put(MANIFEST, manifest.to_json())
        target.sync()
        if self._directory.renames:
            self._directory.rename_child(target.name, plan.name)
        self._remove_old(plan, keep_last, is_own)
        return plan.name

    def abandon(self, plan: Plan, save_id: str) -> None:
        """Removes what was written for a snapshot that is not to be; not one that was committed.

        Raises nothing: what stays is logged.
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

    def _numbered(self) -> list[str]:
        """Names that a snapshot has, by number, whether complete or not."""
        return sorted(filter(_NAME.fullmatch, self._directory.names()), key=lambda name: (_number(name), name))

    def _base_of(self, manifest: Manifest, base: Base) -> Manifest:
        where = f"{self._directory.child(manifest.name)}"
        if MANIFEST not in self._directory.child(base.name).names():
            raise SnapshotError(
                f"{where}: there is a gap: it is on top of {base.name}, which is not there. Load one whose base is"
            )
        found = self.manifest(base.name)
        if found.checksum != base.checksum or not found.is_whole:
            raise SnapshotError(
                f"{where}: it is on top of another {base.name} than is there: checksum {base.checksum:016x}, that of "
                f"{base.name} is {found.checksum:016x}"
            )
        return found

    def _new_base(self) -> Base | None:
        try:
            name = self.newest_with()
            if name is None:
                return None
            _, manifest = self.chain(name)[-1]
        except SnapshotError as error:
            _log.warning("nothing can be saved on top of what is in %s, so all is saved: %s", self, error)
            return None
        return Base(manifest.number, manifest.kind, manifest.checksum)

    def _check(self, plan: Plan, manifest: Manifest, target: Directory) -> None:
        fault = manifest.fault()
        if fault is None and (manifest.number, manifest.kind, manifest.base) != plan:
            fault = f"the manifest is of {manifest.name} on top of {manifest.base}, the plan of {plan.name}"
        if fault is not None:
            raise SnapshotError(f"{target}: {fault}")
        for file in manifest.files:
            try:
                num_bytes = target.size_of(file.file)
            except SnapshotError as error:
                raise SnapshotError(
                    f"{error}. This is the pserver that finishes the save: all pservers should save to one directory"
                ) from error
            if num_bytes != file.num_bytes:
                raise SnapshotError(
                    f"{target}/{file.file}: it has {num_bytes} bytes, its pserver wrote {file.num_bytes}"
                )

    def _remove_old(self, plan: Plan, keep_last: int | None, is_own: Callable[[int], bool]) -> None:
        """Removes what is not kept, and what saves left that did not come to their end."""
        try:
            complete = self.snapshots()
            own = [name for name in complete if is_own(_number(name)) or name == plan.name]
            first = 0 if keep_last is None else self._first_kept(own, keep_last)
            old = [name for name in self._numbered() if _number(name) < plan.number]
            # The newest first: what is still there has its base.
            for name in reversed(old):
                if name not in complete or (name in own and _number(name) < first):
                    self._remove(name)
            for name in self._directory.names():
                if name.startswith(_DRAFT):
                    self._remove(name)
        except SnapshotError as error:
            _log.warning("cannot see what to remove from %s: %s", self, error)

    def _first_kept(self, own: list[str], keep_last: int) -> int:
        """The number of the oldest snapshot that is kept."""
        num_full = 0
        for name in reversed(own):
            if name.endswith(FULL):
                num_full += self.manifest(name).is_whole
            if num_full == keep_last:
                return _number(name)
        return 0

    def _remove(self, name: str) -> None:
        try:
            self._directory.remove_child(name)
        except SnapshotError as error:
            _log.warning("cannot remove %s: %s", self._directory.child(name), error)


def open_chain(where: Directory, tables: Collection[str] = ()) -> list[tuple[Directory, Manifest]]:
    """`SnapshotStore.chain` of the newest snapshot in a directory, or of the one snapshot that the directory is.

    Args:
        where: The directory.
        tables: Names of tables that are wanted. The newest snapshot is the newest one that has them; without names, one
            that has all tables. If there is none it is simply the newest.

    Raises:
        SnapshotError: As `SnapshotStore.chain`.
    """
    if _NAME.fullmatch(where.name) or MANIFEST in where.names():
        return SnapshotStore(where.parent()).chain(where.name)
    series = SnapshotStore(where)
    return series.chain(series.newest_with(tables))


def _number(name: str) -> int:
    return int(name.partition("-")[0])
