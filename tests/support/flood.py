"""Floods the sockets of a pserver as a user without rights: `python -m support.flood`.

It prints, as JSON, what each attack did and was answered, and how many control calls did not fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import grpc

from fleet_sparse.wire.control import METHODS, SERVICE
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import Frame, Header, Op
from fleet_sparse.wire.stream import GREETING, MAGIC

from .fuzzing import message

NOBODY = 65534
NUM_HELD = 100
LARGE_BYTES = 60 << 20
CALL_S = 1.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STRANGER = message(encode(Frame(Header(Op.PULL, client_id=b"s" * 16), [])))
ANNOUNCED = GREETING + struct.pack("<4sIQQ", MAGIC, 1, LARGE_BYTES + 8, LARGE_BYTES)

Address = tuple[str, int] | str


class Attack:
    """What one thread does until a time: connects and sends.

    Attributes:
        num_tries: Number of connections.
        num_connected: Number of those that were accepted by the system.
        num_answered: Bytes received.
    """

    def __init__(self, address: Address, until: float) -> None:
        self.address = address
        self.until = until
        self.num_tries = self.num_connected = self.num_answered = 0

    def connect(self) -> socket.socket:
        self.num_tries += 1
        stream = socket.socket(socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET)
        stream.settimeout(0.2)
        try:
            stream.connect(self.address)
        except OSError:
            stream.close()
            raise
        self.num_connected += 1
        return stream

    def goes_on(self) -> bool:
        return time.monotonic() < self.until

    def receive(self, stream: socket.socket) -> bool:
        """Receives what has arrived; returns False once the other side ended the connection."""
        if not select.select([stream], [], [], 0)[0]:
            return True
        data = stream.recv(1 << 16)
        self.num_answered += len(data)
        return bool(data)


def send_and_close(attack: Attack, make: Callable[[], bytes]) -> None:
    while attack.goes_on():
        with suppress(OSError), attack.connect() as stream:
            stream.sendall(make())
            attack.receive(stream)


def garbage(attack: Attack) -> None:
    rng = random.Random(1)
    send_and_close(attack, lambda: rng.randbytes(rng.randrange(2000)))


def preface(attack: Attack) -> None:
    """Requests of HTTP/2 without end."""
    rng = random.Random(2)
    send_and_close(attack, lambda: PREFACE + bytes(9) + rng.randbytes(1000))


def stall(attack: Attack) -> None:
    """Holds connections that say half of something."""
    hold(attack, lambda rng: rng.choice((b"", GREETING[:7], GREETING + b"FSS1", ANNOUNCED)))


def announce(attack: Attack) -> None:
    """Holds connections that announced large frames, and sends some of each."""
    hold(attack, lambda rng: ANNOUNCED + bytes(rng.choice((0, 100, 1 << 16, 1 << 20))))


def hold(attack: Attack, make: Callable[[random.Random], bytes]) -> None:
    rng = random.Random(3)
    while attack.goes_on():
        with ExitStack() as stack:
            for _ in range(NUM_HELD):
                with suppress(OSError):
                    stream = stack.enter_context(attack.connect())
                    stream.sendall(make(rng))
                if not attack.goes_on():
                    break
            time.sleep(min(1.0, max(attack.until - time.monotonic(), 0.0)))


def endless(attack: Attack) -> None:
    """Messages without end on one connection, and requests whose replies are not read."""
    for data in (GREETING * 1000, GREETING + STRANGER * 200):
        while attack.goes_on():
            with suppress(OSError), attack.connect() as stream:
                while attack.goes_on():
                    stream.sendall(data)


def strange(attack: Attack) -> None:
    """Requests of a client that did not register."""
    while attack.goes_on():
        with suppress(OSError), attack.connect() as stream:
            stream.sendall(GREETING)
            while attack.goes_on() and attack.receive(stream):
                stream.sendall(STRANGER * 20)


def shake_hands(attack: Attack) -> None:
    """TLS without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while attack.goes_on():
        with suppress(OSError), attack.connect() as plain, context.wrap_socket(plain) as stream:
            stream.sendall(GREETING + STRANGER)


def call_all(target: str) -> int:
    """Tries every call of the control plane; returns how many did not fail."""
    num_done = 0
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for name in METHODS:
            try:
                channel.unary_unary(f"/{SERVICE}/{name}")(b"", timeout=CALL_S)
                num_done += 1
            except grpc.RpcError as error:
                # An answer of the pserver, be it a refusal, is more than others may get.
                num_done += error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return num_done


ATTACKS = (garbage, preface, stall, announce, endless, strange, shake_hands)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="unix:NAME or tcp:HOST:PORT")
    parser.add_argument("--control", required=True, help="a path, or HOST:PORT")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--calls", action="store_true", help="try every call of the control plane as well")
    options = parser.parse_args()
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    until = time.monotonic() + options.seconds
    found: dict[str, Any] = {}
    threads = []
    for address in (data_address(options.data), control_address(options.control)):
        for run in ATTACKS:
            attack = found[f"{run.__name__} {address}"] = Attack(address, until)
            threads.append(threading.Thread(target=run, args=[attack]))
    for thread in threads:
        thread.start()
    target = options.control if ":" in options.control else f"unix:{options.control}"
    num_calls = call_all(target) if options.calls else 0
    for thread in threads:
        thread.join()
    told = {name: [each.num_tries, each.num_connected, each.num_answered] for name, each in found.items()}
    print(json.dumps({"calls": num_calls, "attacks": told}))


def data_address(endpoint: str) -> Address:
    kind, _, rest = endpoint.partition(":")
    return f"\0{rest}" if kind == "unix" else control_address(rest)


def control_address(text: str) -> Address:
    if text.startswith("/"):
        return text
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    main()
