"""RowReader: what answers reads of rows and dense values of one version of a model, and what an answer is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.spec import Spec
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.core.version import Version


class Reading(NamedTuple):
    """Rows and dense values of one version."""

    version: Version
    rows: dict[str, NDArray[np.float32]]
    """By name of the table, `(n, dim)`, in the order of the ids that were asked for."""
    values: dict[str, NDArray[np.float32]]
    """By name of the dense array, all of its values."""


class RowReader(Protocol):
    """A `PserverReader`, `SeriesReader` or `LocalReader`, whose methods say more."""

    @property
    def tables(self) -> Mapping[str, TableSpec]: ...
    @property
    def arrays(self) -> Mapping[str, DenseSpec]: ...
    @property
    def leading(self) -> Version | None: ...
    @property
    def num_failovers(self) -> int: ...
    @property
    def problems(self) -> Sequence[str]: ...
    def newest(self) -> Version | None: ...
    def await_version(self, known: Version, timeout_s: float = ...) -> Version: ...
    def await_usable(self, known: Version, deadline: float) -> Version: ...
    def read(
        self,
        ids: Mapping[str, NDArray[np.int64]],
        arrays: Collection[str] = ...,
        *,
        version: Version | None = ...,
        deadline: float | None = ...,
    ) -> Reading: ...
    def changed(self, version: Version, before: Version) -> Mapping[str, NDArray[np.int64]] | None: ...
    def close(self) -> None: ...


def differences_of_reads(ours: Spec, theirs: Spec) -> list[str]:
    """Returns in what two specs differ for a client that only reads; rules and hyperparameters may differ."""
    if isinstance(ours, TableSpec):
        return replace(ours, rule=read_only.name, hyperparameters=()).differences(theirs)
    assert isinstance(ours, DenseSpec), "there are two kinds"
    if not isinstance(theirs, DenseSpec):
        return ours.differences(theirs)
    layouts = [[(each.name, each.offset, each.size) for each in spec.segments] for spec in (ours, theirs)]
    return [] if layouts[0] == layouts[1] else ours.differences(theirs)
