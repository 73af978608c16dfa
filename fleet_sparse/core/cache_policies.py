"""Policies of a row cache, as values: which row makes room, and which row enters.

Each cached row has a counter of 8 bits. The row that makes room is the one with the lowest priority of a few, from a
hand that moves over the index.
"""

from __future__ import annotations

from typing import NamedTuple


class CachePolicy(NamedTuple):
    """How the counter of a row says which row makes room.

    Attributes:
        name: Name in options.
        counts_uses: True if the counter is a number of uses, up to 255; False if it is the time of the last one, in
            sixteenths of the number of reads that the cache has rows.
        is_halved: True if ageing halves the counters.
        round_capacities: Ageing passes each row once in this many reads, as a multiple of the number of rows.
    """

    name: str
    counts_uses: bool
    is_halved: bool
    round_capacities: int


class Admission(NamedTuple):
    """Which of the rows that are read and not cached enter. A sketch estimates how often each was missed of late.

    Attributes:
        name: Name in options.
        least_misses: Least number of misses, this one included.
        beats_victim: True if a row that takes the place of another one must have been missed more often than that one
            was used. The policy must count uses.
    """

    name: str
    least_misses: int
    beats_victim: bool


LRU = CachePolicy("lru", counts_uses=False, is_halved=False, round_capacities=6)
# A longer round misses less while the hot set stays, and forgets it later once it moves. `benchmarks/het_misses.py`,
# caches of 1 % of the rows, two seeds: misses are 17.6, 17.4 and 17.3 % with 16, 18 and 20 capacities; after a move
# they are 0.8 to 1.0, 0.9 to 1.2 and 1.1 to 1.4 points above those of a cache begun anew, where the goal is 1 point.
LFU = CachePolicy("lfu", counts_uses=True, is_halved=False, round_capacities=16)
AGED_LFU = CachePolicy("aged_lfu", counts_uses=True, is_halved=True, round_capacities=16)
POLICIES = {policy.name: policy for policy in (LRU, LFU, AGED_LFU)}

ALL = Admission("all", 1, beats_victim=False)
SECOND = Admission("second", 2, beats_victim=False)
ESTIMATE = Admission("estimate", 1, beats_victim=True)
ADMISSIONS = {admission.name: admission for admission in (ALL, SECOND, ESTIMATE)}


def chosen(policy: str, admit: str) -> tuple[CachePolicy, Admission]:
    """Returns the policies with these names.

    Raises:
        ValueError: There is no such policy, or the two do not fit.
    """
    for what, name, known in (("policy", policy, POLICIES), ("admit", admit, ADMISSIONS)):
        if name not in known:
            raise ValueError(f"{what} is {name!r}, should be one of {', '.join(map(repr, known))}")
    if ADMISSIONS[admit].beats_victim and not POLICIES[policy].counts_uses:
        raise ValueError(f"admit is {admit!r} with policy {policy!r}, which counts no uses; should be {SECOND.name!r}")
    return POLICIES[policy], ADMISSIONS[admit]
