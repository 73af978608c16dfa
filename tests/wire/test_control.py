from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor

from fleet_sparse import errors
from fleet_sparse.errors import (
    DatasetError,
    ErrorCode,
    FleetSparseError,
    Forbidden,
    LogCorrupt,
    PlanError,
    ProtocolError,
    PushRefused,
    ShardUnavailable,
    SnapshotCorrupt,
    TableMismatch,
    WorkerLost,
)
from fleet_sparse.wire import control, control_pb2
from fleet_sparse.wire.control import ATTRIBUTES_KEY, ERROR_KEY, from_status, to_status

WIRE = Path(control.__file__).parent


def errors_of_every_class() -> list[FleetSparseError]:
    needing = {
        ShardUnavailable: ShardUnavailable("shard 1 is gone", shard=1, endpoint="[::1]:7001"),
        WorkerLost: WorkerLost("worker 3 is gone", worker_index=3),
        ProtocolError: ProtocolError("push 6 came, 5 is missing", code=ErrorCode.GAP),
        Forbidden: Forbidden("a reader may not", role="reader", what="Stop"),
        DatasetError: DatasetError("value 2 is 'x'", path="/srv/mödel/part-0", line_number=2**40, slot="ids"),
        LogCorrupt: LogCorrupt("record 7 is wrong", path="/srv/mödel/1.fsl", offset=2**40),
        SnapshotCorrupt: SnapshotCorrupt("block 2 is wrong", path="/srv/mödel/shard-0", offset=2**40),
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, FleetSparseError)]
    return [needing.get(kind) or kind(f"table 'C1': {kind.__name__} of dim 8 und größer") for kind in kinds]


def told(error: FleetSparseError) -> tuple[type, str, dict[str, Any]]:
    return type(error), str(error), vars(error)


# An error travels as a status.


@pytest.mark.parametrize("error", errors_of_every_class(), ids=lambda error: type(error).__name__)
def test_every_error_comes_back_as_it_was(error: FleetSparseError) -> None:
    status = to_status(error)
    metadata = dict(status.metadata)
    assert told(from_status(status.details, metadata[ERROR_KEY], metadata[ATTRIBUTES_KEY])) == told(error)


@pytest.mark.parametrize("code", ErrorCode)
def test_every_protocol_error_code_comes_back(code: ErrorCode) -> None:
    status = to_status(ProtocolError("", code=code))
    error = from_status(status.details, "ProtocolError", dict(status.metadata)[ATTRIBUTES_KEY])
    assert isinstance(error, ProtocolError)
    assert error.code is code


@pytest.mark.parametrize("error", errors_of_every_class(), ids=lambda error: type(error).__name__)
def test_every_error_has_a_status_code_of_grpc(error: FleetSparseError) -> None:
    assert grpc.StatusCode[to_status(error).code] is not grpc.StatusCode.OK


def test_a_derived_error_class_travels_as_its_base() -> None:
    class DimMismatch(TableMismatch):
        pass

    status = to_status(DimMismatch("dim 8 and 16"))
    assert dict(status.metadata)[ERROR_KEY] == "TableMismatch"


def test_an_error_that_is_not_ours_is_an_internal_one() -> None:
    status = to_status(KeyError("rows"))
    assert (status.code, status.details) == ("INTERNAL", "KeyError: 'rows'")
    assert dict(status.metadata)[ERROR_KEY] == "FleetSparseError"


@pytest.mark.parametrize("class_name", ["Unheard", "SystemExit", "ErrorCode", "IntEnum", "__builtins__", ""])
def test_an_unknown_error_class_arrives_as_the_root(class_name: str) -> None:
    assert told(from_status("what it was", class_name)) == (FleetSparseError, "what it was", {})


@pytest.mark.parametrize(
    "attributes",
    ["", "{", "[]", "null", "{}", '{"code": 99}', '{"code": "GAP"}', '{"code": null}', "[" * 100_000],
    ids=lambda text: text[:10],
)
def test_attributes_that_do_not_fit_give_the_root(attributes: str) -> None:
    assert told(from_status("what it was", "ProtocolError", attributes)) == (FleetSparseError, "what it was", {})


def test_a_number_past_all_bounds_gives_the_root() -> None:
    assert type(from_status("", "WorkerLost", '{"worker_index": Infinity}')) is FleetSparseError


# A status travels over gRPC.


class Refusing(grpc.GenericRpcHandler):
    """Answers every call with the error it was given."""

    def __init__(self) -> None:
        self.error: Exception = PlanError("")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
            status = to_status(self.error)
            context.set_trailing_metadata(status.metadata)
            context.abort(grpc.StatusCode[status.code], status.details)

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
def refusing() -> Iterator[tuple[Refusing, grpc.UnaryUnaryMultiCallable[bytes, bytes]]]:
    handler = Refusing()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield handler, channel.unary_unary(f"/{control.SERVICE}/Stop")
    server.stop(None).wait()


def received(call: grpc.UnaryUnaryMultiCallable[bytes, bytes]) -> FleetSparseError:
    with pytest.raises(grpc.RpcError) as caught:
        call(b"", timeout=20)
    refused = caught.value
    assert isinstance(refused, grpc.Call)
    metadata = {key: str(value) for key, value in refused.trailing_metadata()}
    return from_status(refused.details() or "", metadata[ERROR_KEY], metadata[ATTRIBUTES_KEY])


def test_every_error_comes_back_over_a_socket(
    refusing: tuple[Refusing, grpc.UnaryUnaryMultiCallable[bytes, bytes]],
) -> None:
    handler, call = refusing
    for error in errors_of_every_class():
        handler.error = error
        assert told(received(call)) == told(error)


def test_a_message_past_the_limit_comes_back_cut(
    refusing: tuple[Refusing, grpc.UnaryUnaryMultiCallable[bytes, bytes]],
) -> None:
    handler, call = refusing
    handler.error = PushRefused("a" + "ü" * 100_000)
    assert told(received(call)) == (PushRefused, "a" + "ü" * 1023, {})


# The generated module is the one of control.proto.

TYPES = {
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_SFIXED64: "sfixed64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_FIXED64: "fixed64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
}
SOURCE = re.sub(r"//.*", "", (WIRE / "control.proto").read_text())


def test_the_generated_messages_are_those_of_the_proto() -> None:
    written = {
        name: re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body)
        for name, body in re.findall(r"message (\w+) \{([^}]*)\}", SOURCE)
    }
    generated = {
        name: [
            (
                "repeated " if field.is_repeated else "",
                kind.name if (kind := field.message_type or field.enum_type) else TYPES[field.type],
                field.name,
                str(field.number),
            )
            for field in message.fields
        ]
        for name, message in control_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    assert generated == written


def test_the_generated_calls_are_those_of_the_proto() -> None:
    written = re.findall(r"rpc (\w+)\((\w+)\) returns \((\w+)\);", SOURCE)
    service = control_pb2.DESCRIPTOR.services_by_name["Control"]
    assert [(call.name, call.input_type.name, call.output_type.name) for call in service.methods] == written


def test_the_stubs_have_every_message_and_field() -> None:
    stubs = (WIRE / "control_pb2.pyi").read_text()
    for name, message in control_pb2.DESCRIPTOR.message_types_by_name.items():
        body = re.search(rf"class {name}\(_message\.Message\):\n((?:    .*\n)+)", stubs)
        assert body is not None
        fields = re.findall(r"^    ([a-z]\w*): ", body.group(1), re.MULTILINE)
        assert fields == [field.name for field in message.fields]


def test_methods_are_the_calls_of_the_service() -> None:
    service = control_pb2.DESCRIPTOR.services_by_name["Control"]
    assert service.full_name == control.SERVICE
    assert {name: (request.DESCRIPTOR, reply.DESCRIPTOR) for name, (request, reply) in control.METHODS.items()} == {
        call.name: (call.input_type, call.output_type) for call in service.methods
    }


def test_the_generated_code_runs_on_the_oldest_protobuf_we_allow() -> None:
    source = (WIRE / "control_pb2.py").read_text()
    assert "# Protobuf Python Version: 6.31." in source
