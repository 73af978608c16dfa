"""`fleet-sparse shrink`: rows of a running job."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
from typer.testing import CliRunner

from fleet_sparse import cli
from fleet_sparse.core.mode import ASYNC, SUM, Mode
from fleet_sparse.core.placement import Placement
from fleet_sparse.errors import SettingError, ShardUnavailable
from fleet_sparse.settings import Settings
from fleet_sparse.worker.modes.sync_async import PserverTraining
from fleet_sparse.worker.rows.deduplicator import Deduplicator
from fleet_sparse.worker.rows.row_batch import RowBatch
from support.admissions import table
from support.pserver_job import PserverJob, connected, pserver_job

__all__ = ["pserver_job"]  # a fixture


def shrink(*arguments: object, fails: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["shrink", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == fails, result.output
    return result.output


def test_rows_of_a_running_job_go_after_a_dry_run(pserver_job: PserverJob) -> None:
    pservers, spec, mode = pserver_job(2), table(None), Mode(ASYNC, SUM)
    with connected(pservers.endpoints, [spec], Settings(), mode=mode) as (control, client):
        deduplicator = Deduplicator(Placement.even(2))
        training = PserverTraining(client, deduplicator, mode, 1)
        unique, _ = deduplicator.unique([np.arange(100)], spec.salt)
        grads = np.where(unique.ids[:, None] < 40, 0.5, -9.0).astype(np.float32) * np.ones((100, 2), np.float32)
        training.update([RowBatch(spec, unique, grads, 1.0, 0, [])], [], 1.0)
        training.drain()

        def num_rows() -> int:
            return sum(state.num_rows for reply in control.stats() for state in reply.tables)

        endpoints = ",".join(pservers.endpoints)
        (planned,) = json.loads(shrink(endpoints, "--min-norm", 1, "--dry-run", "--json"))["removed"]
        assert (planned["table"], planned["num_rows"], num_rows()) == ("emb", 40, 100)
        assert len(planned["examples"]) == 5
        assert "norm below 1" in shrink(endpoints, "--min-norm", 1)
        assert num_rows() == 60
        assert "'emb'" in shrink(endpoints, "--min-score", 1, "--dry-run")


def test_a_shrink_without_a_criterion_is_refused() -> None:
    with pytest.raises(SettingError, match="--min-score"):
        shrink("localhost:1")


def test_a_job_that_has_ended_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_SPARSE_CONNECT_S", "3600")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ShardUnavailable, match=endpoint):
            shrink(endpoint, "--min-norm", 1)
