"""What clients of each role may ask of a pserver."""

from __future__ import annotations

from google.protobuf.message import Message

from fleet_sparse.errors import Forbidden
from fleet_sparse.keys import READER, TRAINER, WATCHER, forbidden
from fleet_sparse.wire import control_pb2 as messages
from fleet_sparse.wire.frame_format import READS, Op

CALLS: dict[str, frozenset[str]] = {
    READER: frozenset({"Register", "Attend", "Stats", "Attach", "AwaitVersion"}),
    WATCHER: frozenset({"Stats"}),
}
"""Calls of the control plane that a role may make. A trainer may make all, any other role none."""
OPS: dict[str, frozenset[Op]] = {READER: READS | {Op.PULL}}
"""Ops of the data plane that a role may ask, in the same way."""
_VISITORS = (messages.ROLE_READER, messages.ROLE_TOOL)


def check_call(role: str, method: str, request: Message) -> None:
    """Checks that a role may make a call of the control plane.

    Raises:
        Forbidden: It may not.
    """
    if role == TRAINER:
        return
    if method not in CALLS.get(role, ()):
        raise _forbidden(role, method)
    if isinstance(request, messages.RegisterRequest) and request.role not in _VISITORS:
        raise _forbidden(role, "Register as a worker")


def may_ask(role: str, op: int) -> bool:
    """Returns whether a role may ask an op of the data plane, by the number of the op."""
    return role == TRAINER or op in OPS.get(role, ())


def _forbidden(role: str, what: str) -> Forbidden:
    return forbidden("control plane", role, what)
