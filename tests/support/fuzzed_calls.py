"""Fuzzed calls of the control plane, none of which changes a row, and what they may be answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from fleet_sparse.core.initializer import constant
from fleet_sparse.core.mode import ASYNC, SYNC, Mode
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import CONTROL_VERSION, METHODS

from .fuzzing import EDGES, mutated_bytes
from .shards import ADAM, CLIENT, DENSE, READS, SGD

SPECS = (SGD, ADAM, DENSE)
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # this client waits no longer
}
CALL_S = 0.1
TEXTS = (
    *("", "a", "b", "model", "model/b", ".", "..", "../a", "/etc", "a/../b", "x" * 300, "\0", "a\nb", "ü", "\ud7ff"),
    *("full", "delta", "sgd", "adam", "dense", "other", "min_norm", "unseen_days", "min_score", "hottest"),
    *("{}", "[]", "null", "1e999", "NaN", "[" * 2000, '{"epoch": 1}', '{"a": 1', "shard-0-of-1.fss", "../x.fss"),
    *(Mode(SYNC).to_json(), Mode(ASYNC).to_json(), *(spec.to_json() for spec in (*SPECS, READS))),
    TableSpec(name="other", dim=4, rule="adagrad", initializer=constant(0.0)).to_json(),
    SGD.to_json().replace("2", "3"),
    ADAM.to_json().replace("adam", "adamw"),
)
USUAL: dict[str, Sequence[Any]] = {
    "protocol_version": [CONTROL_VERSION],
    "role": [1],
    "worker_index": [0],
    "num_workers": [1],
    "client_id": [CLIENT],
    "mode": ["", Mode(SYNC).to_json(), Mode(ASYNC).to_json()],
    "table_specs": [spec.to_json() for spec in SPECS],
    "kind": ["full", "delta"],
    "dirname": ["model"],
    "save_id": ["a", "b"],
    "load_id": ["a", "b"],
    "tables": ["sgd", "adam", "dense"],
    "decay": [1.0],
}
CLIENTS = (CLIENT, b"b" * 16, b"c" * 16, b"", b"short")


def fuzzed_message(rng: random.Random, kind: type[Message]) -> Any:
    """A message whose fields are often right, or nearly."""
    made: Any = kind()
    for field in kind.DESCRIPTOR.fields:
        if rng.random() > 0.1:
            fill(rng, made, field)
    return made


def blurred(rng: random.Random, made: Any) -> Any:
    """A message after a change of some of its fields, or of none."""
    for field in made.DESCRIPTOR.fields:
        if rng.random() < 0.07:
            made.ClearField(field.name)
            fill(rng, made, field)
    return made


def fill(rng: random.Random, made: Any, field: FieldDescriptor) -> None:
    count = rng.randrange(3) if field.is_repeated else 1
    values = getattr(made, field.name)
    if field.message_type is not None:
        kind: Any = getattr(messages, field.message_type.name)
        for _ in range(count):
            child = fuzzed_message(rng, kind)
            if field.is_repeated:
                values.append(child)
            else:
                values.CopyFrom(child)
    elif field.is_repeated:
        values.extend(value_of(rng, field) for _ in range(count))
    else:
        setattr(made, field.name, value_of(rng, field))


def value_of(rng: random.Random, field: FieldDescriptor) -> Any:  # noqa: PLR0911  # one for each type
    if field.name == "name" and field.containing_type.name == "ShrinkCriterion" and rng.random() < 0.9:
        return rng.choice(("unseen_days", "min_norm", "min_score", "hottest"))
    if field.name in USUAL and rng.random() < 0.8:
        return rng.choice(USUAL[field.name])
    if field.type == FieldDescriptor.TYPE_FIXED64 and rng.random() < 0.8:
        return 0  # an id that the client does not know yet
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice(CLIENTS)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return rng.choice((0.0, 1.0, 0.5, -1.0, 1e300, float("inf"), float("nan")))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 4, 99, -1))
    number = rng.choice((0, 0, 1, 1, 2, 3, *EDGES))
    if field.type == FieldDescriptor.TYPE_UINT32:
        return number & 0xFFFFFFFF
    return number - 2**63 if field.type == FieldDescriptor.TYPE_SFIXED64 else number


def save_requests(rng: random.Random, call: Callable[[Any], Any]) -> None:
    """A save or a load, whose requests are changed on the way."""
    name = f"s{rng.randrange(10**9)}"

    def ask(request: Any) -> Any:
        return call(blurred(rng, request))

    if rng.random() < 0.2:
        tables = rng.sample(["sgd", "adam", "dense"], rng.randrange(3))
        ask(messages.StageLoadRequest(dirname="model", load_id=name, tables=tables, missing_ok=rng.random() < 0.5))
        ask(messages.FinishLoadRequest(load_id=name, keep=rng.random() < 0.7, resumes=rng.random() < 0.3))
        return
    kind = rng.choice(("full", "delta"))
    plan = ask(messages.PlanSaveRequest(dirname="model", save_id=name, kind=kind)) or messages.SavePlan()
    position = messages.WorkerPosition(worker_index=0, step=1, position='{"a": 1}')
    ask(messages.BeginSaveRequest(plan=plan, position=position, client_id=CLIENT, ends_day=rng.random() < 0.3))
    file = ask(messages.WriteSaveRequest(save_id=name)) or messages.ShardFile()
    finished = ask(messages.FinishSaveRequest(plan=plan, files=[blurred(rng, file)], keep_last=2))
    checksum = finished.checksum if finished else 0
    ask(messages.EndSaveRequest(save_id=name, committed=bool(finished), checksum=checksum))


def harmless(name: str, data: bytes) -> bytes | None:
    """A request that a trainer may send without a change of rows; None if there is none."""
    try:
        parsed: Any = METHODS[name][0].FromString(data)
    except DecodeError:
        return data
    if name == "Stop":
        return None
    if name == "Shrink":
        parsed.dry_run = True
    elif name == "BeginSave":
        for left_out in parsed.left_out:
            for criterion in left_out.criteria:
                criterion.name, criterion.value = "min_norm", min(criterion.value, 0.0)
    else:
        return data
    return bytes(parsed.SerializeToString())


def fuzzed_call(rng: random.Random) -> tuple[str, bytes]:
    while True:
        name = rng.choice(list(METHODS))
        data = fuzzed_message(rng, METHODS[name][0]).SerializeToString()
        if rng.random() < 0.3:
            data = mutated_bytes(rng, data)
        data = harmless(name, data)
        if data is not None:
            return name, data
