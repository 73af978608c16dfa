"""Traffic of a worker's step: requests, table blocks, rows and bytes, as docs/protocol.md defines them."""

from __future__ import annotations

import math
from typing import NamedTuple

from .job import FLOAT_BYTES, ID_BYTES, SYNC, PlannedJob

HEADER_BYTES, BLOCK_BYTES = 128, 64  # of docs/protocol.md; importing the frame code would load Numba
VERSION_BYTES, COUNT_BYTES, SLACK_BYTES = 4, 4, 1  # of row caches, likewise


class StepTraffic(NamedTuple):
    """Counts of one worker's step, over all pservers."""

    requests: float
    """Frames that the worker sends, each of which has a reply."""
    blocks: float
    """Table blocks and dense blocks of these frames."""
    rows: float
    """Distinct ids; each is pulled and pushed once. With a row cache, half of the rows that are pulled or pushed."""
    to_pservers: float
    """Bytes."""
    from_pservers: float
    """Bytes."""

    @property
    def num_bytes(self) -> float:
        """Bytes in both directions."""
        return self.to_pservers + self.from_pservers


def traffic_of(job: PlannedJob, num_pservers: int) -> StepTraffic:
    """Returns the traffic of a pull of the distinct ids and a push of their gradients and the dense ones.

    A frame larger than the frame limit is split; the extra headers are not counted.
    """
    hit = num_pservers * probability_of_hit(num_pservers, job.distinct_ids)
    pull_blocks = job.tables * num_pservers * probability_of_hit(num_pservers, job.distinct_ids / job.tables)
    pulls = num_pservers if job.mode == SYNC else hit
    pushes = num_pservers if job.mode == SYNC or job.exchanges_dense else hit
    push_blocks = job.tables * num_pservers if job.mode == SYNC else pull_blocks
    dense_blocks, dense_bytes = (num_pservers, job.dense_bytes) if job.exchanges_dense else (0, 0.0)
    blocks = pull_blocks + push_blocks + 2 * dense_blocks
    ids, cached, row_bytes = job.distinct_ids, job.cached, FLOAT_BYTES * job.dim
    states = ids * row_bytes
    pulled = ids * (cached.plain * ID_BYTES + cached.asked * (ID_BYTES + VERSION_BYTES))
    pushed = ids * (cached.pushed * (ID_BYTES + row_bytes) + cached.changed * COUNT_BYTES) + cached.states_sent * states
    received = ids * (cached.pulled * row_bytes + cached.asked * SLACK_BYTES + cached.received * VERSION_BYTES)
    received += cached.states_received * states
    headers = HEADER_BYTES * (pulls + pushes)
    return StepTraffic(
        requests=pulls + pushes,
        blocks=blocks,
        rows=ids * (cached.pulled + cached.pushed) / 2,
        to_pservers=headers + BLOCK_BYTES * blocks + pulled + pushed + dense_bytes,
        from_pservers=headers + BLOCK_BYTES * (pull_blocks + dense_blocks) + received + dense_bytes,
    )


def probability_of_hit(num_pservers: int, num_ids: float) -> float:
    """Returns the probability that a pserver owns at least one of the ids."""
    return 1.0 if num_pservers == 1 else -math.expm1(num_ids * math.log1p(-1 / num_pservers))
