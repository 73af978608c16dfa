"""What each role may ask: every call and every op."""

from __future__ import annotations

import pytest

from fleet_sparse.errors import Forbidden
from fleet_sparse.pserver.permissions import check_call, may_ask
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.control import METHODS
from fleet_sparse.wire.frame_format import Op

CALLS = {
    "trainer": set(METHODS),
    "reader": {"Attend", "Stats", "Attach", "AwaitVersion"},
    "watcher": {"Stats"},
    "pserver": set(),
    "": set(),
}
OPS = {"trainer": set(Op), "reader": {Op.PULL, Op.READ, Op.CHANGED}, "watcher": set(), "pserver": set(), "": set()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", CALLS)
def test_a_role_may_make_the_calls_of_the_table(role: str, method: str) -> None:
    request = METHODS[method][0]()
    if method in CALLS[role]:
        check_call(role, method, request)
        return
    with pytest.raises(Forbidden) as caught:
        check_call(role, method, request)
    assert caught.value.role == role
    assert caught.value.what.startswith(method)


@pytest.mark.parametrize("role", OPS)
def test_a_role_may_ask_the_ops_of_the_table(role: str) -> None:
    assert {op for op in Op if may_ask(role, op)} == OPS[role]
    assert may_ask(role, 999) is (role == "trainer")


@pytest.mark.parametrize("registers_as", [messages.ROLE_READER, messages.ROLE_TOOL])
def test_a_reader_registers_without_a_place_in_the_job(registers_as: messages.Role) -> None:
    check_call("reader", "Register", messages.RegisterRequest(role=registers_as))
    with pytest.raises(Forbidden):
        check_call("reader", "Register", messages.RegisterRequest(role=messages.ROLE_WORKER))
    with pytest.raises(Forbidden):
        check_call("watcher", "Register", messages.RegisterRequest(role=registers_as))
