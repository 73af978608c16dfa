"""Replicas of shards: which replica gets the next try of a read, and which version a client may go over to.

Nothing here does I/O, waits or locks. Times are seconds of a monotonic clock, given by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet_sparse.core.version import Version

AVOID_S, AVOID_MAX_S = 0.5, 8.0
"""Seconds for which a replica is avoided after its first fault, and at most after one of many in a row."""
SPREAD_S = 0.2
"""Seconds that a version waits for the last replicas to adopt it, so that each of them can take over at once."""
BACK_S = 10.0
"""Seconds after which a client goes back to an older version because no replica has its own any more."""


@dataclass(slots=True)
class Replica:
    """A pserver that serves one shard.

    Attributes:
        shard: Index of the shard.
        versions: Versions that it can answer, the one that it adopted last first.
        is_attached: False until it is attached, and while it cannot be reached.
        avoided_until: Time before which others are preferred.
        num_faults: Number of faults in a row.
    """

    shard: int
    versions: tuple[Version, ...] = ()
    is_attached: bool = False
    avoided_until: float = -math.inf
    num_faults: int = 0


class Replicas:
    """Condition and versions of the replicas of all shards. A replica is named by its index.

    Args:
        shards: Shard of each replica.

    Attributes:
        num_shards: Number of shards.
        num_failovers: Number of tries that went to another replica than the first one.
    """

    def __init__(self, shards: Sequence[int]) -> None:
        self._replicas = [Replica(shard) for shard in shards]
        self._of_shard: dict[int, list[int]] = {}
        for index, shard in enumerate(shards):
            self._of_shard.setdefault(shard, []).append(index)
        self._last = dict.fromkeys(self._of_shard, -1)
        self._offered_since: dict[Version, float] = {}
        self._lost_since: float | None = None
        self.num_shards = len(self._of_shard)
        self.num_failovers = 0

    def __getitem__(self, index: int) -> Replica:
        return self._replicas[index]

    def attach(self, index: int, versions: Sequence[Version]) -> None:
        """A replica was reached and has these versions."""
        replica = self._replicas[index]
        replica.is_attached, replica.versions = True, tuple(versions)
        replica.num_faults, replica.avoided_until = 0, -math.inf

    def detach(self, index: int) -> None:
        """A replica cannot be reached, or was started again."""
        replica = self._replicas[index]
        replica.is_attached, replica.versions = False, ()

    def set_versions(self, index: int, versions: Sequence[Version]) -> None:
        """An attached replica has these versions."""
        self._replicas[index].versions = tuple(versions)

    def forget(self, index: int, version: Version) -> None:
        """A replica does not have a version."""
        replica = self._replicas[index]
        replica.versions = tuple(each for each in replica.versions if each != version)

    def note_fault(self, index: int, now: float) -> None:
        """A try was lost or late: others are preferred for some time, which doubles with every fault in a row."""
        replica = self._replicas[index]
        replica.avoided_until = now + min(AVOID_S * 2.0**replica.num_faults, AVOID_MAX_S)
        replica.num_faults = min(replica.num_faults + 1, 16)

    def note_answer(self, index: int) -> None:
        """A try was answered in time."""
        replica = self._replicas[index]
        replica.num_faults, replica.avoided_until = 0, -math.inf

    def choose(self, shard: int, version: Version, tried: Mapping[int, float], now: float) -> int | None:
        """Returns the replica for the next try: in turn those that are not avoided, else the one avoided first.

        Args:
            shard: The shard.
            version: The version that is read.
            tried: Replicas that were tried, which are left out.
            now: Time.
        """
        indices = self._of_shard[shard]
        offering = [
            index
            for index in indices
            if index not in tried and (replica := self._replicas[index]).is_attached and version in replica.versions
        ]
        if not offering:
            return None
        sound = [index for index in offering if self._replicas[index].avoided_until <= now]
        if not sound:
            return min(offering, key=lambda index: self._replicas[index].avoided_until)
        chosen = next((index for index in sound if index > self._last[shard]), sound[0])
        self._last[shard] = chosen
        return chosen

    def is_offered(self, shard: int, version: Version) -> bool:
        """Returns whether a replica of the shard has the version."""
        return any(version in each.versions for each in self._attached(shard))

    def lacks(self, shard: int, version: Version, now: float) -> bool:
        """Returns whether no replica of the shard has the version that is not avoided, or none at all if all are."""
        attached = list(self._attached(shard))
        asked = [each for each in attached if each.avoided_until <= now] or attached
        return bool(asked) and not any(version in each.versions for each in asked)

    def is_silent(self, shard: int) -> bool:
        """Returns whether no replica of the shard is attached that answered the last try in time."""
        return all(each.num_faults for each in self._attached(shard))

    def missing_shard(self, version: Version | None = None) -> int | None:
        """Returns the first shard without a replica that is attached, or has a version; None if all have one."""
        for shard in self._of_shard:
            if version is None and not any(True for _ in self._attached(shard)):
                return shard
            if version is not None and not self.is_offered(shard, version):
                return shard
        return None

    def newest(self) -> Version | None:
        """Returns the version that a client without one begins with; None while the shards have none in common.

        It is one that all shards adopted last; else the newest one that all of them have.
        """
        latest = self._common(
            {shard: {r.versions[0] for r in self._attached(shard) if r.versions} for shard in self._of_shard}
        )
        return max(latest or self._common(self._offers()), default=None)

    def leading(self) -> Version | None:
        """Returns the newest version that any replica adopted last, whether all have it or not."""
        return max((r.versions[0] for r in self._replicas if r.is_attached and r.versions), default=None)

    def successor(self, known: Version, now: float) -> tuple[Version | None, float]:
        """Returns the version that a client goes over to, and the time at which to ask again if nothing happens.

        A newer version is taken when all replicas have it that are attached and not avoided; `SPREAD_S` later
        when each shard has one that does; and at once if `known` is gone. An older one is taken if each shard has a
        replica that adopted it after `known`, as after a rollback, or if `known` is gone for `BACK_S`.

        Args:
            known: The version that the client has.
            now: Time.
        """
        common = self._common(self._offers()) - {known}
        is_gone = self.missing_shard(known) is not None
        candidates = [version for version in sorted(common, reverse=True) if self._may_follow(version, known)]
        self._offered_since = {version: self._offered_since.get(version, now) for version in candidates}
        again_at = math.inf
        for version in candidates:
            due_at = self._offered_since[version] + SPREAD_S
            if is_gone or now >= due_at or self._have_all(version, now):
                return version, math.inf
            again_at = min(again_at, due_at)
        if candidates or not (is_gone and common):
            self._lost_since = None
            return None, again_at
        # Only older versions are left: all replicas lag behind, or they were started again after a rollback.
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now >= self._lost_since + BACK_S:
            self._lost_since = None
            return max(common), math.inf
        return None, self._lost_since + BACK_S

    def _attached(self, shard: int) -> Iterator[Replica]:
        return (each for index in self._of_shard[shard] if (each := self._replicas[index]).is_attached)

    def _offers(self) -> dict[int, set[Version]]:
        return {shard: {v for each in self._attached(shard) for v in each.versions} for shard in self._of_shard}

    def _common(self, versions: Mapping[int, set[Version]]) -> set[Version]:
        return set.intersection(*versions.values())

    def _have_all(self, version: Version, now: float) -> bool:
        return all(version in r.versions for r in self._replicas if r.is_attached and r.avoided_until <= now)

    def _may_follow(self, version: Version, known: Version) -> bool:
        """Returns whether no replica left a newer version for `known`, or each shard has one that left `known`."""
        if version.number >= known.number:
            return not any(_is_behind(version, known, each.versions) for each in self._replicas if each.is_attached)
        return all(
            any(_is_behind(known, version, each.versions) for each in self._attached(shard)) for shard in self._of_shard
        )


def _is_behind(version: Version, other: Version, versions: tuple[Version, ...]) -> bool:
    """Returns whether both are in a list, and the other one was adopted later."""
    return version in versions and other in versions and versions.index(other) < versions.index(version)


class Tries:
    """The tries of one read: several frames, each for one shard.

    A frame is tried at one replica. If that is lost, or lacks the version, or does not answer within `try_s`, the
    next one is tried at once; the first answer counts. If all were tried, the oldest try is repeated after `retry_s`.

    Args:
        replicas: Their condition, which the tries change.
        version: The version that is read.
        shards: Shard of each frame.
        try_s: Seconds after which a try is late.
        retry_s: Seconds after which a try is repeated at the same replica.
    """

    def __init__(
        self, replicas: Replicas, version: Version, shards: Sequence[int], *, try_s: float, retry_s: float
    ) -> None:
        self._replicas = replicas
        self._version = version
        self._shards = shards
        self._try_s = try_s
        self._retry_s = retry_s
        self._pending: dict[int, dict[int, float]] = {frame: {} for frame in range(len(shards))}
        self._had_fault: set[int] = set()  # frames that had a try which failed or is late
        self._late: set[tuple[int, int]] = set()

    @property
    def is_done(self) -> bool:
        """True if every frame is answered."""
        return not self._pending

    @property
    def pending_shard(self) -> int:
        """The shard of a frame that is not answered, one that is silent before others, which had no time to answer."""
        shards = [self._shards[frame] for frame in self._pending]
        return next(filter(self._replicas.is_silent, shards), shards[0])

    def is_gone(self, now: float) -> bool:
        """Returns whether a frame is not worth further tries: sound replicas of its shard lack the version.

        It may be tried at others, which are all late; then another version is answered sooner.
        """
        return any(
            all((frame, replica) in self._late for replica in tries)
            and self._replicas.lacks(self._shards[frame], self._version, now)
            for frame, tries in self._pending.items()
        )

    def due(self, now: float) -> list[tuple[int, int]]:
        """Returns frames that are to be sent now, each with its replica."""
        sends = []
        for frame, tries in self._pending.items():
            if tries and now < max(tries.values()) + self._try_s:
                continue
            for replica, sent_at in tries.items():
                if (frame, replica) not in self._late and now >= sent_at + self._try_s:
                    self._late.add((frame, replica))
                    self._had_fault.add(frame)
                    self._replicas.note_fault(replica, now)
            chosen = self._replicas.choose(self._shards[frame], self._version, tries, now)
            if chosen is None:
                chosen = next((r for r, at in tries.items() if now >= at + self._retry_s), None)
            elif frame in self._had_fault:
                self._replicas.num_failovers += 1
            if chosen is not None:
                tries[chosen] = now
                sends.append((frame, chosen))
        return sends

    def wait_until(self) -> float:
        """Returns the time at which to call `due` again if nothing happens."""
        times = [math.inf]
        for frame, tries in self._pending.items():
            if tries:
                newest = max(tries, key=lambda replica: tries[replica])
                is_late = (frame, newest) in self._late
                times.append(min(tries.values()) + self._retry_s if is_late else tries[newest] + self._try_s)
        return min(times)

    def answer(self, frame: int, replica: int) -> bool:
        """A replica has answered a frame; returns whether the answer counts."""
        tries = self._pending.pop(frame, None)
        if tries is None:
            return False
        if (frame, replica) not in self._late:
            self._replicas.note_answer(replica)
        return True

    def refuse(self, frame: int, replica: int) -> None:
        """A replica does not have the version."""
        self._replicas.forget(replica, self._version)
        self._drop(frame, replica)

    def lose(self, replica: int, now: float) -> None:
        """The connection to a replica was lost, with its tries."""
        self._replicas.note_fault(replica, now)
        for frame in self._pending:
            self._drop(frame, replica)

    def begin_again(self) -> None:
        """All connections were replaced, so no try is answered any more."""
        for tries in self._pending.values():
            tries.clear()
        self._late.clear()

    def _drop(self, frame: int, replica: int) -> None:
        tries = self._pending.get(frame)
        if tries is not None and tries.pop(replica, None) is not None:
            self._late.discard((frame, replica))
            self._had_fault.add(frame)
