"""The link of a benchmark: never faster than its shape, and plausibly near it."""

from __future__ import annotations

import socket
from argparse import ArgumentTypeError
from contextlib import AbstractContextManager

import pytest

from benchmarks.link import Link, Shape, probe, shaped_link


def link_to(target: socket.socket) -> AbstractContextManager[Link]:
    """Returns a link to a listening socket."""
    return shaped_link([("127.0.0.1:0", "{}:{}".format(*target.getsockname()))])


def client_of(link: Link) -> socket.socket:
    """Returns a connection through a link."""
    host, _, port = link.addresses[0].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


@pytest.fixture(scope="module")
def found():
    return probe(Shape(delay_ms=10, gbit_per_s=0.2), seconds=0.2, echoes=5)


def test_an_echo_takes_both_delays(found) -> None:
    assert 20 <= found.echo_ms <= 60


def test_each_direction_has_its_rate(found) -> None:
    for gbit_per_s in (found.up_gbit_per_s, found.down_gbit_per_s):
        assert 0.1 <= gbit_per_s <= 0.2001


def test_a_faster_link_is_faster(found) -> None:
    faster = probe(Shape(delay_ms=0.1, gbit_per_s=2), seconds=0.1, echoes=5)
    assert faster.echo_ms < found.echo_ms
    assert faster.up_gbit_per_s > found.up_gbit_per_s


def test_bytes_pass_in_order_and_each_end_passes_alone() -> None:
    sent = bytes(range(256)) * 4096
    with socket.create_server(("127.0.0.1", 0)) as target, link_to(target) as link:
        link.shape(Shape(1, 1))
        with client_of(link) as client:
            server, _ = target.accept()
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            with server, server.makefile("rb") as received:
                assert received.read() == sent
                server.sendall(b"x")
            assert (client.recv(1), client.recv(1)) == (b"x", b"")


def test_a_missing_target_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        before = link_to(target)
    with before as link, client_of(link) as client:
        assert client.recv(1) == b""


@pytest.mark.parametrize("text", ["1", "x1", "1x", "0x1", "1x-1"])
def test_a_link_is_a_delay_and_a_rate_above_0(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        Shape.parse(text)
