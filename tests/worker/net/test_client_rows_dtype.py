"""A client whose rows travel in two bytes a float."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fleet_sparse.errors import PushRefused
from fleet_sparse.settings import Settings
from support.client_calls import pulled, push
from support.in_process import InProcessCluster

Quick = Callable[..., Settings]


@pytest.mark.parametrize(("rows_dtype", "third"), [("float16", 0.333251953125), ("bfloat16", 0.333984375)])
@pytest.mark.guarantee("R1")
def test_rows_and_gradients_travel_rounded_on_request(
    cluster: InProcessCluster, quick: Quick, rows_dtype: str, third: float
) -> None:
    client = cluster.client(quick(rows_dtype=rows_dtype))
    push(cluster, client, cluster.table, [1], gradient=1 / 3)
    client.flush()
    row = 1 - np.float32(third) / 4  # on the pserver
    assert pulled(cluster, cluster.client(), cluster.table, [1]) == {1: [row] * 4}
    bits = 11 if rows_dtype == "float16" else 8
    assert pulled(cluster, client, cluster.table, [1]) == {1: [np.rint(row * 2**bits) / 2**bits] * 4}


@pytest.mark.guarantee("R2")
def test_steps_below_the_rounding_add_up_on_the_pserver(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(rows_dtype="bfloat16"))
    for step in range(1, 9):
        push(cluster, client, cluster.table, [1], gradient=2.0**-8, step=step)
        row = pulled(cluster, client, cluster.table, [1])[1][0]
        assert row == np.rint((1 - step * 2.0**-10) * 2**8) / 2**8
    assert row == 1 - 2.0**-7


@pytest.mark.guarantee("R6")
def test_a_gradient_past_float16_is_refused_with_what_to_set(cluster: InProcessCluster, quick: Quick) -> None:
    client = cluster.client(quick(rows_dtype="float16"))
    push(cluster, client, cluster.table, [1], gradient=7e4)
    with pytest.raises(PushRefused, match=r"infinite as float16, which ends at 65504\. Write \w+ROWS_DTYPE=bfloat16"):
        client.flush()
    bfloat16 = cluster.client(quick(rows_dtype="bfloat16"))
    push(cluster, bfloat16, cluster.table, [1], gradient=2.0**17)
    assert pulled(cluster, bfloat16, cluster.table, [1]) == {1: [-(2.0**15)] * 4}
