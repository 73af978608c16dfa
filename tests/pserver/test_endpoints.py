from __future__ import annotations

import pytest

from fleet_sparse.errors import SettingError
from fleet_sparse.net_addresses import Address
from fleet_sparse.pserver.endpoints import choose
from fleet_sparse.settings import Settings

HERE = {"10.0.0.1", "here", "127.0.0.1"}
ONE_MACHINE = (Address("10.0.0.1", 6000), Address("here", 6001))
TWO_MACHINES = (Address("10.0.0.1", 6000), Address("10.0.0.2", 6000))


def is_here(host: str) -> bool:
    return host in HERE


@pytest.mark.parametrize("insecure", [False, True])
def test_pservers_of_one_machine_listen_to_it_alone(insecure: bool) -> None:
    chosen = choose(ONE_MACHINE[0], ONE_MACHINE, Settings(insecure=insecure), is_local=is_here)
    assert str(chosen.control) == "127.0.0.1:6000"
    assert (chosen.data_host, chosen.advertised_host, chosen.is_exposed) == ("127.0.0.1", "127.0.0.1", False)


def test_pservers_of_several_machines_listen_if_allowed() -> None:
    chosen = choose(TWO_MACHINES[0], TWO_MACHINES, Settings(insecure=True), is_local=is_here)
    assert chosen.control == TWO_MACHINES[0]
    assert (chosen.data_host, chosen.advertised_host, chosen.is_exposed) == ("10.0.0.1", "10.0.0.1", True)


def test_data_plane_binds_where_it_is_told() -> None:
    settings = Settings(insecure=True, data_host="0.0.0.0")
    chosen = choose(TWO_MACHINES[0], TWO_MACHINES, settings, is_local=is_here)
    assert (chosen.data_host, chosen.advertised_host) == ("0.0.0.0", "10.0.0.1")


def test_data_plane_binds_to_loopback_if_it_is_told_so() -> None:
    settings = Settings.from_environment({"FLEET_SPARSE_INSECURE": "1", "FLEET_SPARSE_DATA_HOST": "127.0.0.1"})
    assert choose(TWO_MACHINES[0], TWO_MACHINES, settings, is_local=is_here).data_host == "127.0.0.1"


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingError, match=r"10\.0\.0\.2:6000"):
        choose(TWO_MACHINES[1], TWO_MACHINES, Settings(insecure=True), is_local=is_here)
