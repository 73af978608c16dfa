from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.settings import Settings
from fleet_sparse.worker.net import channel_choice
from fleet_sparse.worker.net.channel_choice import open_channel
from fleet_sparse.worker.net.shard_link import Registration
from fleet_sparse.worker.net.stream_channel import StreamChannel
from fleet_sparse.worker.net.zmq_channel import ZmqChannel
from support.streams import StreamServer


@pytest.fixture
def endpoint() -> Iterator[str]:
    """A stream endpoint where somebody listens."""
    with closing(StreamServer(list)) as server:
        yield server.endpoint


def chosen(channel: str, *stream_endpoints: str) -> type:
    registrations = [
        Registration(1, shard, len(stream_endpoints), 1, 1, "127.0.0.1:1", stream_endpoint=each)
        for shard, each in enumerate(stream_endpoints)
    ]
    with closing(open_channel(registrations, Settings(channel=channel))) as opened:
        return type(opened)


def test_streams_are_used_where_all_pservers_have_them(endpoint: str) -> None:
    assert chosen("auto", endpoint, endpoint) is StreamChannel


def test_zeromq_is_used_where_a_pserver_has_none(endpoint: str) -> None:
    assert chosen("auto", endpoint, "") is ZmqChannel


def test_zeromq_is_used_where_a_stream_cannot_be_reached(endpoint: str) -> None:
    assert chosen("auto", endpoint, "unix:in another network namespace") is ZmqChannel


def test_zeromq_is_used_where_a_stream_is_of_another_user(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_choice, "is_trusted", lambda stream: False)
    assert chosen("auto", endpoint) is ZmqChannel


@pytest.fixture
def crowded() -> Iterator[socket.socket]:
    """A listener by a Unix socket where as many wait to be accepted as may."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind("")
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                waiting = opened.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(listener.getsockname())
        yield listener


def test_streams_are_used_where_many_connect_at_once(crowded: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_choice.time, "sleep", lambda pause_s: crowded.accept()[0].close())
    assert chosen("auto", f"unix:{crowded.getsockname()[1:].decode()}") is StreamChannel


def test_zeromq_is_used_where_nobody_accepts(crowded: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_choice, "_CONNECT_S", 0.05)
    assert chosen("auto", f"unix:{crowded.getsockname()[1:].decode()}") is ZmqChannel


def test_zeromq_is_used_where_it_is_asked_for(endpoint: str) -> None:
    assert chosen("zmq", endpoint) is ZmqChannel


def test_streams_are_used_where_they_are_asked_for_although_nobody_listens_yet() -> None:
    assert chosen("stream", "unix:later") is StreamChannel


def test_streams_that_a_pserver_does_not_have_are_refused(endpoint: str) -> None:
    with pytest.raises(SettingError, match=r"^FLEET_SPARSE_CHANNEL: is stream, but shard 1 at 127\.0\.0\.1:1 does not"):
        chosen("stream", endpoint, "")
