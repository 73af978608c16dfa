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


def chosen(channel: str, *stream_endpoints: str, zmq: str = "127.0.0.1:1") -> type:
    registrations = [
        Registration(1, shard, len(stream_endpoints), 1, 1, zmq, stream_endpoint=each)
        for shard, each in enumerate(stream_endpoints)
    ]
    with closing(open_channel(registrations, Settings(channel=channel))) as opened:
        return type(opened)


def test_auto_uses_streams(endpoint: str) -> None:
    assert chosen("auto", endpoint, endpoint, zmq="") is StreamChannel


def test_auto_uses_zeromq_if_pservers_accept_only_that() -> None:
    assert chosen("auto", "", "") is ZmqChannel


def test_zmq_uses_zeromq(endpoint: str) -> None:
    assert chosen("zmq", endpoint) is ZmqChannel


def test_stream_does_not_wait_for_a_listener() -> None:
    assert chosen("stream", "unix:later") is StreamChannel


@pytest.mark.parametrize(("channel", "zmq"), [("stream", "127.0.0.1:1"), ("auto", "127.0.0.1:1"), ("zmq", "")])
def test_a_channel_that_a_pserver_lacks_is_refused(endpoint: str, channel: str, zmq: str) -> None:
    with pytest.raises(SettingError, match="FLEET_SPARSE_CHANNEL"):
        chosen(channel, endpoint, "", zmq=zmq)


def test_an_unreachable_unix_socket_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingError, match=r"shard 1: .*FLEET_SPARSE_CHANNEL=zmq"):
        chosen("auto", endpoint, "unix:in another network namespace")


def test_a_unix_socket_of_another_user_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_choice, "is_trusted", lambda stream: False)
    with pytest.raises(SettingError, match="FLEET_SPARSE_CHANNEL=zmq"):
        chosen("auto", endpoint)


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


def test_a_crowded_unix_socket_is_tried_again(crowded: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_choice.time, "sleep", lambda pause_s: crowded.accept()[0].close())
    assert chosen("auto", f"unix:{crowded.getsockname()[1:].decode()}") is StreamChannel
