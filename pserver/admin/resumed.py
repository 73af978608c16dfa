"""ResumedJob: the snapshot that the pservers loaded, as its workers continue from it."""

from __future__ import annotations

import json
from typing import Any

from fleet_sparse.snapshot.manifest import Manifest, WorkerPosition


class ResumedJob:
    """The workers' positions in a snapshot, summed up once, so that each worker is sent its own only.

    Args:
        manifest: Manifest of the snapshot.
    """

    def __init__(self, manifest: Manifest) -> None:
        steps = [position.step for position in manifest.workers]
        epochs = [_epoch_of(position) for position in manifest.workers]
        known = [epoch for epoch in epochs if epoch is not None]
        self._by_worker = {position.worker: position for position in manifest.workers}
        self._common: dict[str, Any] = {
            "snapshot": manifest.name,
            "is_whole": manifest.is_complete,
            "tables": manifest.tables,
            "num_workers": len(manifest.workers),
            "min_step": min(steps, default=0),
            "max_step": max(steps, default=0),
            "min_epoch": min(known) if known and len(known) == len(epochs) else None,
        }

    def json_for(self, worker_index: int) -> str:
        """Returns the answer to the registration of a worker, as docs/protocol.md describes it."""
        own = self._by_worker.get(worker_index)
        worker = None if own is None else {"step": own.step, "position": own.position}
        return json.dumps({**self._common, "worker": worker})


def _epoch_of(position: WorkerPosition) -> int | None:
    """Returns the epoch of a loader's position; None if it is not known."""
    try:
        return int(position.position["epoch"])  # None, or what another version wrote
    except (TypeError, KeyError, ValueError):
        return None
