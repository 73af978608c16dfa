from __future__ import annotations

import socket

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.pserver.endpoints import Address, choose, is_local, number_of
from fleet_sparse.settings import Settings

HERE = {"10.0.0.1", "here", "127.0.0.1"}
ONE_MACHINE = (Address("10.0.0.1", 6000), Address("here", 6001))
TWO_MACHINES = (Address("10.0.0.1", 6000), Address("10.0.0.2", 6000))


@pytest.fixture
def no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


def is_here(host: str) -> bool:
    return host in HERE


@pytest.mark.parametrize("insecure", [False, True])
def test_pservers_of_one_machine_listen_to_it_alone(insecure: bool) -> None:
    chosen = choose(ONE_MACHINE[0], ONE_MACHINE, Settings(insecure=insecure), is_local=is_here)
    assert str(chosen.control) == "127.0.0.1:6000"
    assert (chosen.data_host, chosen.advertised_host, chosen.is_exposed) == ("127.0.0.1", "127.0.0.1", False)


def test_pservers_of_several_machines_are_refused_without_keys() -> None:
    with pytest.raises(SettingError, match=r"pserver 10\.0\.0\.2:6000: .* FLEET_SPARSE_INSECURE=1"):
        choose(TWO_MACHINES[0], TWO_MACHINES, Settings(), is_local=is_here)


def test_pservers_of_several_machines_listen_where_workers_know_them_if_that_is_allowed() -> None:
    chosen = choose(TWO_MACHINES[0], TWO_MACHINES, Settings(insecure=True), is_local=is_here)
    assert chosen.control == TWO_MACHINES[0]
    assert (chosen.data_host, chosen.advertised_host, chosen.is_exposed) == ("10.0.0.1", "10.0.0.1", True)


def test_data_plane_binds_where_it_is_told() -> None:
    settings = Settings(insecure=True, data_host="0.0.0.0")
    chosen = choose(TWO_MACHINES[0], TWO_MACHINES, settings, is_local=is_here)
    assert (chosen.data_host, chosen.advertised_host) == ("0.0.0.0", "10.0.0.1")


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingError, match=r"control address 10\.0\.0\.2:6000: it is not an address of this machine"):
        choose(TWO_MACHINES[1], TWO_MACHINES, Settings(insecure=True), is_local=is_here)


@pytest.mark.parametrize("text", ["10.0.0.1:6000", "host.name:0", "[::1]:65535"])
def test_address_reads_and_prints_the_same(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:65536", "host:-1"])
def test_other_text_is_no_address(text: str) -> None:
    with pytest.raises(SettingError, match="should be host:port"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "0.0.0.0"])
def test_loopback_is_local(host: str) -> None:
    assert is_local(host)


def test_documentation_address_is_not_local() -> None:
    assert not is_local("203.0.113.77")  # RFC 5737


def test_host_without_an_address_is_not_local(no_names: None) -> None:
    assert not is_local("x")


def test_name_of_a_host_has_a_number() -> None:
    assert number_of("localhost") in ("127.0.0.1", "::1")


def test_host_without_an_address_is_refused(no_names: None) -> None:
    with pytest.raises(SettingError, match="host 'x': it has no address"):
        number_of("x")
