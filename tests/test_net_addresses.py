from __future__ import annotations

import socket

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.net_addresses import Address, as_reached, ip_address_of, is_listening, is_local


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


def is_here(host: str) -> bool:
    return host in {"10.0.0.1", "here"}


def nowhere(address: Address) -> bool:
    return False


def test_pservers_of_this_machine_are_reached_over_loopback() -> None:
    found = as_reached(["10.0.0.1:6000", "here:6001"], is_local=is_here, is_exposed=nowhere)
    assert found == ["127.0.0.1:6000", "127.0.0.1:6001"]


def test_pservers_of_several_machines_are_reached_as_listed() -> None:
    endpoints = ["10.0.0.1:6000", "10.0.0.2:6000"]
    assert as_reached(endpoints, is_local=is_here, is_exposed=nowhere) == endpoints


def test_exposed_pservers_of_this_machine_are_reached_as_listed() -> None:
    endpoints = ["10.0.0.1:6000", "here:6001"]
    assert as_reached(endpoints, is_local=is_here, is_exposed=lambda address: address.port == 6001) == endpoints


def test_listening_address_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(*listener.getsockname())
        assert is_listening(address)
    assert not is_listening(address)


@pytest.mark.parametrize("text", ["10.0.0.1:6000", "host.name:0", "[::1]:65535"])
def test_address_reads_and_prints_the_same(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:65536", "host:-1"])
def test_other_text_is_not_an_address(text: str) -> None:
    with pytest.raises(SettingError, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "0.0.0.0"])
def test_loopback_is_local(host: str) -> None:
    assert is_local(host)


def test_documentation_address_is_not_local() -> None:
    assert not is_local("203.0.113.77")  # RFC 5737


def test_host_without_an_address_is_not_local(no_names: None) -> None:
    assert not is_local("x")


def test_name_of_a_host_has_an_ip_address() -> None:
    assert ip_address_of("localhost") in ("127.0.0.1", "::1")


def test_host_without_an_address_is_refused(no_names: None) -> None:
    with pytest.raises(SettingError, match="host 'x'"):
        ip_address_of("x")
