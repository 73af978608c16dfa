"""examples/serving/app.py over a real socket, in front of read-only pservers. It needs the extra `serve`."""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest

from fleet_sparse.local_pservers import LocalPservers, local_pservers
from support.jobs import environment, outputs_of, wait_for_line
from support.sources import ROOT

NEEDED = ("fastapi", "uvicorn")
pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in NEEDED), reason="needs fleet-sparse[serve]"
)
APP = ROOT / "examples" / "serving" / "app.py"
NPZ, JSON = "application/x-npz", "application/json"
MAX_BATCH = 64


class Service(NamedTuple):
    """A running service."""

    host: str
    directory: Path
    pservers: LocalPservers
    ids: Any
    expected: Any

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = JSON) -> tuple[int, Any, Any]:
        """Returns status, headers and body, decoded if it is JSON."""
        connection = http.client.HTTPConnection(self.host, timeout=30)
        try:
            connection.request(method, path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        is_json = (answer.getheader("content-type") or "").startswith(JSON)
        return answer.status, answer.headers, json.loads(content) if is_json else content

    def predict(self, value: Any) -> tuple[int, Any, Any]:
        """Sends JSON."""
        return self.ask("POST", "/predict", json.dumps(value).encode())


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("service")
    outputs_of("served.py", directory, 1, num_servers=2)
    with (
        np.load(directory / "expected.npz") as known,
        local_pservers(3, root=directory, load_dirname="serve/rows", arguments=["--read-only"]) as pservers,
    ):
        command = [sys.executable, "-W", "ignore", str(APP), "serve", "--pservers", ",".join(pservers.endpoints)]
        command += ["--port", "0", "--processes", "2", "--max-batch", str(MAX_BATCH)]
        with subprocess.Popen(
            command,
            cwd=directory,
            env=environment(FLEET_SPARSE_DEADLINE_S="2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                url = wait_for_line(process, r"^(http://\S+)$")[1]
                yield Service(urlsplit(url).netloc, directory, pservers, known["ids"], known["prediction"])
            finally:
                process.send_signal(signal.SIGINT)  # as Ctrl-C
                output, _ = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in output) == (0, False), output


def npz_of(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def test_it_listens_on_this_host_alone(service: Service) -> None:
    assert service.host.startswith("127.0.0.1:")


def test_ids_as_numbers_and_as_strings_predict_alike(service: Service) -> None:
    assert max(abs(int(each)) for each in service.ids.flat) > 2**53
    for ids in (
        service.ids.tolist(),
        service.ids.astype(str).tolist(),
        [[str(row[0]), *row[1:]] for row in service.ids.tolist()],
    ):
        status, _, answer = service.predict({"ids": ids})
        assert status == 200, answer
        (found,) = answer["outputs"].values()
        np.testing.assert_allclose(found, service.expected, rtol=1e-6, atol=1e-6)
        assert answer["version"]["number"] == 1


def test_npz_is_answered_with_npz(service: Service) -> None:
    status, headers, content = service.ask("POST", "/predict", npz_of(ids=service.ids), NPZ)
    assert (status, headers["content-type"]) == (200, NPZ)
    _, _, version = service.ask("GET", "/version")
    with np.load(io.BytesIO(content)) as answer:
        assert {"number": int(answer["version.number"]), "checksum": str(answer["version.checksum"])} == version
        (name,) = [each for each in answer.files if not each.startswith("version.")]
        np.testing.assert_allclose(answer[name], service.expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_any_size_are_answered(service: Service, size: int) -> None:
    status, _, content = service.ask("POST", "/predict", npz_of(ids=service.ids[:size]), NPZ)
    assert status == 200
    with np.load(io.BytesIO(content)) as answer:
        assert [len(answer[each]) for each in answer.files if not each.startswith("version.")] == [size]


@pytest.mark.parametrize("path", ["/version", "/healthz", "/readyz"])
def test_each_state_names_the_version(service: Service, path: str) -> None:
    status, _, answer = service.ask("GET", path)
    assert (status, answer["number"], len(answer["checksum"])) == (200, 1, 16)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({}, "'ids'"),
        ({"ids": [[1, 2, 3, 4]], "other": 1}, "'other'"),
        ({"ids": [[1, 2, 3]]}, "(1, 3)"),
        ({"ids": [[1, 2, 3, 4], [1]]}, "'ids'"),
        ({"ids": [[1.5, 2, 3, 4]]}, "1.5"),
        ({"ids": [["1", 2, 3, True]]}, "True"),
        ({"ids": [["a", 2, 3, 4]]}, "'a'"),
        ({"ids": [[2**63, 2, 3, 4]]}, str(2**63)),
        ({"ids": [["-9223372036854775809", 2, 3, 4]]}, "-9223372036854775809"),
        ({"ids": None}, "'ids'"),
        ([1], "list"),
    ],
)
def test_a_wrong_feed_is_422_and_named(service: Service, value: Any, text: str) -> None:
    status, _, answer = service.predict(value)
    assert status == 422
    assert text in answer["detail"]


def damaged() -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, ids=np.arange(3000))
    content = bytearray(file.getvalue())
    content[60:200] = bytes(140)
    return bytes(content)


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04", npz_of(ids=np.array([{}], object)), damaged()])
def test_an_npz_that_is_none_is_422(service: Service, body: bytes) -> None:
    status, _, answer = service.ask("POST", "/predict", body, NPZ)
    assert status == 422
    assert "npz" in answer["detail"]


def test_a_body_that_is_not_json_is_422(service: Service) -> None:
    status, _, answer = service.ask("POST", "/predict", b"{")
    assert status == 422
    assert NPZ in answer["detail"]


def test_more_examples_than_allowed_are_413(service: Service) -> None:
    status, _, answer = service.predict({"ids": [[1, 2, 3, 4]] * (MAX_BATCH + 1)})
    assert status == 413
    assert f"{MAX_BATCH + 1} examples" in answer["detail"]


@pytest.mark.parametrize("model", ["absent", "serve"])
def test_a_service_that_cannot_begin_says_why_in_one_line(service: Service, model: str) -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(APP),
        model,
        "--pservers",
        service.pservers.endpoints[0],
        "--port",
        "0",
    ]
    ended = subprocess.run(
        command, cwd=service.directory, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    (line,) = [each for each in ended.stderr.splitlines() if not each.startswith("[")]  # logs are the others
    assert ended.returncode == 1
    assert line.startswith("app.py: ")
    assert ("it has no SERVING.json" if model == "absent" else "it is shard 0 of 3, should be shard 0 of 1") in line


def test_without_a_pserver_it_is_alive_but_not_ready(service: Service) -> None:
    service.pservers.processes[1].suspend()
    try:
        status, headers, answer = service.ask("GET", "/readyz")
        assert (status, headers["retry-after"]) == (503, "1")
        assert f"shard 1 at {service.pservers.endpoints[1]}" in answer["detail"]
        assert service.ask("GET", "/healthz")[0] == 200
    finally:
        service.pservers.processes[1].resume()
