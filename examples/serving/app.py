"""An HTTP service around a Predictor: one process for each core, on 127.0.0.1.

    pip install 'fleet-sparse[cpu,serve]'
    python examples/serving/app.py serve --pservers 127.0.0.1:6180,127.0.0.1:6181 --processes 2

    POST /predict   {"ids": [[1, "9223372036854775807"]], "dense": [[0.5]]}, or a .npz with one array for each input
    GET /version    version that is served
    GET /healthz    200 once this process has a version
    GET /readyz     200 if a prediction with ids of all pservers succeeds

Ids may be strings, because JSON numbers above 2^53 lose bits in JavaScript. A request of content type
`application/x-npz` gets its answer as npz, with the version in two more arrays.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import paddle
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from fleet_sparse.errors import FleetSparseError, ShardUnavailable
from fleet_sparse.serving.model import EXAMPLES, ServedModel, Tensor, read_model, read_network_file
from fleet_sparse.serving.npz_file import WRONG_NPZ
from fleet_sparse.serving.predictor import Prediction, Predictor
from fleet_sparse.snapshot.directory import Directory, directory_at

NPZ = "application/x-npz"
MODEL, PSERVERS, MAX_BATCH = "SERVE_MODEL", "SERVE_PSERVERS", "SERVE_MAX_BATCH"
"""Environment variables from which each process makes its app."""
MAX_BYTES = 64 << 20
"""Largest request, and largest content of an npz."""
NUM_READY_EXAMPLES = 64
BACKLOG = 1024
END_S = 20.0


class TooLarge(Exception):
    """A request has too many bytes or examples."""


def create() -> FastAPI:
    """Makes the app of one process, with a Predictor of its own."""
    model, max_batch = os.environ[MODEL], int(os.environ[MAX_BATCH])
    directory = directory_at(model)
    served = read_model(directory)
    feed_when_ready = ready_feed(directory, served)
    predictor = Predictor(model, os.environ[PSERVERS])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with predictor:
            app.state.predictor = predictor
            yield

    app = FastAPI(title="fleet_sparse", lifespan=lifespan)

    @app.exception_handler(ValueError)
    async def wrong_feed(_: Request, error: ValueError) -> Response:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(TooLarge)
    async def too_large(_: Request, error: TooLarge) -> Response:
        return JSONResponse({"detail": str(error)}, 413)

    @app.exception_handler(ShardUnavailable)
    async def unavailable(_: Request, error: ShardUnavailable) -> Response:
        return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        is_npz = request.headers.get("content-type", "").partition(";")[0].strip() == NPZ
        body = await body_of(request)
        feed = feed_of_npz(body) if is_npz else feed_of_json(served, json_of(body))
        check_batch(served, feed, max_batch)
        prediction = await run_in_threadpool(app.state.predictor.run, feed)
        return npz_answer(prediction) if is_npz else JSONResponse(json_answer(prediction))

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return version_of(app.state.predictor.stats().version)

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return version_of(app.state.predictor.stats().version)

    @app.get("/readyz")
    async def readyz() -> dict[str, Any]:
        prediction = await run_in_threadpool(app.state.predictor.run, feed_when_ready)
        return version_of(prediction.version)

    return app


async def body_of(request: Request) -> bytes:
    """Reads the body of a request of at most `MAX_BYTES`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BYTES:
            raise TooLarge(f"request: has more than {MAX_BYTES} bytes. Send fewer examples")
    return bytes(body)


def json_of(body: bytes) -> dict[str, Any]:
    """Parses a JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"request: is not JSON ({error}); for npz send Content-Type {NPZ}") from None
    if not isinstance(value, dict):
        raise ValueError(f"request: is a JSON {type(value).__name__}, should be an object of inputs by name")
    return value


def feed_of_json(model: ServedModel, values: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs as arrays; those of unknown names stay as they are, for the Predictor to name them."""
    tensors = {each.name: each for each in model.feeds}
    return {name: array_of(tensors[name], value) if name in tensors else value for name, value in values.items()}


def array_of(tensor: Tensor, value: Any) -> NDArray[Any]:
    """The array of nested lists; whole numbers may be strings.

    Raises:
        ValueError: It is not one; the message names the input.
    """
    dtype = np.dtype(tensor.dtype)
    try:
        if dtype.kind not in "iu":
            return np.asarray(value, dtype)
        array = np.asarray(value)
        if array.dtype.kind == "i" or not array.size:
            return array.astype(np.int64)
        array = np.array(value, object)  # neither rounds numbers nor cuts strings
        return np.array([whole(each) for each in array.flat], np.int64).reshape(array.shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"feed {tensor.name!r}: {error}; should be nested lists of {dtype}") from None


def whole(value: Any) -> int:
    """A number of 64 bits, given as an int or in decimal digits."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"has {value!r}, should have whole numbers")
    number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"has {number}, which is not in [-2^63, 2^63)")
    return number


def feed_of_npz(body: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file without pickles, of at most `MAX_BYTES` in all."""
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            num_bytes = sum(each.file_size for each in archive.infolist())
        if num_bytes > MAX_BYTES:
            raise TooLarge(f"request: its arrays have {num_bytes} bytes, should have at most {MAX_BYTES}")
        with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except WRONG_NPZ as error:
        raise ValueError(f"request: is not an npz file of arrays ({error})") from None


def check_batch(model: ServedModel, feed: Mapping[str, Any], max_batch: int) -> None:
    """Raises TooLarge if an input has more than `max_batch` examples; the ids of fields of variable length are more."""
    for name, array in feed.items():
        if name not in model.ragged and np.ndim(array) and len(array) > max_batch:
            raise TooLarge(f"feed {name!r}: has {len(array)} examples, should have at most {max_batch}")


def ready_feed(directory: Directory, model: ServedModel) -> dict[str, NDArray[Any]]:
    """Examples with different ids, so that every pserver is asked; the model's own if fields have variable length."""
    if model.ragged:
        with np.load(io.BytesIO(read_network_file(directory, model, EXAMPLES))) as examples:
            return {name.removeprefix("feed."): examples[name] for name in examples.files}
    sizes = {each.feed: each.size for each in model.lookups if each.feed is not None}
    feed = {}
    for tensor in model.feeds:
        shape = [1 if size == -1 else size for size in tensor.shape]
        if shape and tensor.shape[0] == -1:
            shape[0] = NUM_READY_EXAMPLES
        array = np.zeros(shape, tensor.dtype)
        if tensor.name in sizes:
            array = np.arange(array.size, dtype=tensor.dtype).reshape(shape) % (sizes[tensor.name] or array.size)
        feed[tensor.name] = array
    return feed


def json_answer(prediction: Prediction) -> dict[str, Any]:
    """The answer as JSON; numbers that are not finite are null."""
    outputs = {}
    for name, array in prediction.outputs.items():
        is_number = np.isfinite(array)
        outputs[name] = array.tolist() if is_number.all() else np.where(is_number, array.astype(object), None).tolist()
    return {"version": version_of(prediction.version), "outputs": outputs}


def npz_answer(prediction: Prediction) -> Response:
    """The answer as npz."""
    file, version = io.BytesIO(), version_of(prediction.version)
    named = {f"version.{name}": np.array(value) for name, value in version.items()}
    np.savez(file, **prediction.outputs, **named)  # type: ignore[arg-type]
    return Response(file.getvalue(), media_type=NPZ)


def version_of(version: Any) -> dict[str, Any]:
    """A version as it is named everywhere; a checksum as a JSON number would lose bits."""
    return {"number": version.number, "checksum": f"{version.checksum:016x}"}


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description="Serves predictions of a model over HTTP, on 127.0.0.1.")
    parser.add_argument("model", help="directory that fleet.save_inference_model wrote")
    parser.add_argument(
        "--pservers", required=True, help="host:port of a read-only pserver for each shard, with commas"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for any; the first line of output has it")
    parser.add_argument("--processes", type=int, default=1, help="a process for each core is best")
    parser.add_argument("--max-batch", type=int, default=4096, help="largest number of examples of a request")
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes: is {options.processes}, should be 1 or more")
    try:
        read_model(directory_at(options.model))
    except FleetSparseError as error:
        sys.exit(f"app.py: {error}")
    os.environ.update({MODEL: options.model, PSERVERS: options.pservers, MAX_BATCH: str(options.max_batch)})
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", options.port))
        listener.listen(BACKLOG)  # requests wait until the processes are ready
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        run_processes(listener, options.processes)


def run_processes(listener: socket.socket, num_processes: int) -> None:
    """Runs processes that accept from one socket; once one ends, ends all and exits with its code."""
    spawning = multiprocessing.get_context("spawn")  # Paddle does not survive a fork
    processes = [spawning.Process(target=run_process, args=(listener,)) for _ in range(num_processes)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        for process in processes:
            process.start()
        ended = wait([process.sentinel for process in processes])
        for process in processes:
            if process.sentinel in ended:
                process.join()  # it has no exit code yet when its sentinel is ready
        sys.exit(max(abs(process.exitcode or 0) for process in processes))
    finally:
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(END_S)
            process.kill()  # if it has not ended
            process.join()


def run_process(listener: socket.socket) -> None:
    """Serves in this process until it is told to end. Without model or pservers it says why in one line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process too, which ends this one
    paddle.disable_signal_handler()  # it prints a stack trace at SIGTERM
    try:
        app = create()
    except FleetSparseError as error:
        sys.exit(f"app.py: {error}")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


if __name__ == "__main__":
    main()
