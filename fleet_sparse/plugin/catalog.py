"""Catalog: the tables and dense arrays that the programs of this process declare."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from fleet_sparse.core.dense_spec import DenseSpec
from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.core.mode import GEO, Mode
from fleet_sparse.core.rules import read_only
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.errors import PlanError
from fleet_sparse.worker.modes.all_reduce import ReducedProgram
from fleet_sparse.worker.modes.geo import dense_on_pservers, table_on_pservers

from .accessor_config import AccessorConfig
from .optimizer_config import OptimizerConfig
from .row_cache import RowCache
from .static.dense_parameters import DenseParameters

READ_ONLY = OptimizerConfig(read_only.name, ())


class Catalog:
    """Tables by name and dense arrays in the order of their declaration. Thread-safe.

    Args:
        seed: Seed of tables whose embedding states none.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()  # guards all below
        self._mode: Mode | None = None
        self._tables: dict[str, TableSpec] = {}
        self._dense: tuple[DenseParameters, ...] = ()
        self._local_tables: dict[str, TableSpec] = {}
        self._local_dense: dict[str, DenseSpec] = {}
        self._sizes: dict[str, int] = {}
        self._layers: dict[str, EmbeddingSpec] = {}
        self._unregistered: list[TableSpec | DenseSpec] = []
        self._reduced: ReducedProgram | None = None
        self._accessors: dict[str, AccessorConfig] = {}
        self._row_cache: RowCache | None = None

    @property
    def row_cache(self) -> RowCache | None:
        """Options of the row caches; None if no program has some."""
        return self._row_cache

    @property
    def reduced(self) -> ReducedProgram | None:
        """The program whose dense gradients the workers merge; None if there is none."""
        return self._reduced

    @property
    def mode(self) -> Mode | None:
        """Mode of the programs that train; None before the first one."""
        return self._mode

    @property
    def tables(self) -> Mapping[str, TableSpec]:
        """Tables by name, as pservers have them."""
        return self._tables

    @property
    def dense(self) -> Sequence[DenseParameters]:
        """Dense arrays, as pservers have them."""
        return self._dense

    @property
    def local_tables(self) -> Mapping[str, TableSpec]:
        """The trained tables in geo mode, with the rule that this worker trains them with."""
        return self._local_tables

    @property
    def local_dense(self) -> Mapping[str, DenseSpec]:
        """The trained dense arrays in geo mode, with the rule that this worker trains them with."""
        return self._local_dense

    @property
    def sizes(self) -> Mapping[str, int]:
        """Largest number of rows of the tables for which ids past the size are refused."""
        return self._sizes

    @property
    def layers(self) -> Mapping[str, EmbeddingSpec]:
        """Tables that layers such as `paddle.nn.Embedding(sparse=True)` declare, by name."""
        return self._layers

    @property
    def has_unregistered(self) -> bool:
        """True if the pservers do not know all tables and arrays yet."""
        return bool(self._unregistered)

    def unregistered(self) -> list[TableSpec | DenseSpec]:
        """The tables and arrays that the pservers do not know yet."""
        return list(self._unregistered)

    def mark_registered(self, specs: Sequence[TableSpec | DenseSpec]) -> None:
        """Notes that the pservers know `specs`."""
        with self._lock:
            self._unregistered = [spec for spec in self._unregistered if spec not in specs]

    def mark_all_unregistered(self) -> None:
        """Notes that the pservers of the next connection know nothing yet."""
        with self._lock:
            self._unregistered = [*self._tables.values(), *(dense.spec for dense in self._dense)]

    def declare_mode(self, mode: Mode) -> None:
        """Declares how a program trains.

        Raises:
            PlanError: Another program trains in another mode.
        """
        with self._lock:
            has_trained = any(spec.rule != read_only.name for spec in self._tables.values()) or self._dense
            if self._mode not in (None, mode) and has_trained:
                assert self._mode is not None, "another program has one"
                differ_in_limits = mode == msgspec.structs.replace(self._mode, cache_limits=mode.cache_limits)
                raise PlanError(
                    f"minimize: another program trains in mode {self._mode}, this one in {mode}; "
                    "give all of them one DistributedStrategy"
                    + (", with RowCache(hold_back=0) if one of them clips by a norm" if differ_in_limits else "")
                )
            self._mode = mode

    def declare_row_cache(self, row_cache: RowCache | None) -> None:
        """Declares the options with which a program's rows are cached.

        Raises:
            PlanError: Another program has others.
        """
        with self._lock:
            if self._row_cache is not None and row_cache is not None and self._row_cache != row_cache:
                raise PlanError(
                    f"PserverStrategy.row_cache: another program has {self._row_cache}, this one has {row_cache}; give "
                    "all of them one PserverStrategy"
                )
            self._row_cache = row_cache

    def declare_size(self, embedding: EmbeddingSpec) -> None:
        """Declares that ids past the size of a table are refused.

        Raises:
            PlanError: The embedding states no size, or has an entry.
        """
        if embedding.size is None:
            raise PlanError(
                f"PserverStrategy.refuse_ids_past_size: is True, and table {embedding.name!r} has no size, because "
                "sparse_embedding ignores it. Write embedding(..., is_sparse=True, is_distributed=True)"
            )
        if embedding.entry is not None:
            raise PlanError(
                f"PserverStrategy.refuse_ids_past_size: is True, and table {embedding.name!r} has the entry "
                f"{embedding.entry}, so that only pservers know which ids get a row. Leave one of both out"
            )
        if not embedding.is_bounded:
            with self._lock:
                self._sizes[embedding.name] = embedding.size

    def declare_accessors(self, accessors: Mapping[str, AccessorConfig]) -> None:
        """Declares settings of tables, by name, before the tables."""
        with self._lock:
            self._accessors = {**self._accessors, **accessors}

    @property
    def accessors(self) -> Mapping[str, AccessorConfig]:
        """Settings of tables, by name, of those that have some."""
        return self._accessors

    def learning_rate_of(self, table: str) -> float | None:
        """The learning rate of a table that does not have that of the optimizer; None for other tables."""
        accessor = self._accessors.get(table)
        return None if accessor is None or accessor.rule is None else accessor.rule.learning_rate

    def declare_layers(self, tables: Mapping[str, EmbeddingSpec]) -> None:
        """Declares sparse parameters of a program that is given to fleet as tables."""
        with self._lock:
            self._layers = {**tables, **self._layers}

    def declare_table(self, embedding: EmbeddingSpec, optimizer: OptimizerConfig) -> TableSpec:
        """Declares a table; a read-only one takes the update rule of the first optimizer that trains it.

        Raises:
            PlanError: The table is declared with another dim, rule, initializer or seed.
        """
        if embedding.name in self._accessors:
            embedding, optimizer = self._accessors[embedding.name].applied(embedding, optimizer)
        try:
            spec = TableSpec(
                name=embedding.name,
                dim=embedding.dim,
                rule=optimizer.rule,
                hyperparameters=optimizer.of_table(embedding),
                initializer=embedding.initializer,
                seed=embedding.seed or self._seed,
                max_ids=embedding.max_ids,
                entry=embedding.entry,
                has_show_click=embedding.has_show_click,
            )
        except ValueError as error:  # a name or size that no pserver accepts
            raise PlanError(str(error)) from None
        with self._lock:
            spec = self._on_pservers(spec)
            known = self._tables.get(spec.name)
            if known is not None:
                _check_same(known, spec)
                if known.rule != READ_ONLY.rule or spec.rule == READ_ONLY.rule:
                    return known
            self._tables[spec.name] = spec
            self._unregistered.append(spec)
        return spec

    def _on_pservers(self, spec: TableSpec) -> TableSpec:
        """The table as pservers have it: in geo mode the update rule stays on the worker."""
        if not self._is_geo or spec.rule == read_only.name:
            return spec
        if spec.entry is not None:
            raise PlanError(
                f"table {spec.name!r}: entry is {spec.entry}, and geo training (k_steps > 0) pushes changes that the "
                "pservers cannot refuse. Leave the entry out, or train with k_steps 0"
            )
        if spec.has_show_click:
            raise PlanError(
                f"table {spec.name!r}: its rows go through continuous_value_model, and geo training (k_steps > 0) "
                "pushes changes of rows, no shows and clicks. Train with k_steps 0"
            )
        _check_same(self._local_tables.setdefault(spec.name, spec), spec)
        return table_on_pservers(spec)

    @property
    def _is_geo(self) -> bool:
        return self._mode is not None and self._mode.kind == GEO

    def check_untrained(self, names: Iterable[str]) -> None:
        """Checks that no other program trains the dense parameters `names`.

        Raises:
            PlanError: One of them is trained; the message names it.
        """
        with self._lock:
            taken = {name for dense in self._dense if dense.is_trained for name in dense.names}
        if both := sorted(taken.intersection(names)):
            raise PlanError(f"minimize: parameter {both[0]!r} is trained by another program already")

    def declare_dense(self, dense: DenseParameters) -> DenseParameters:
        """Declares dense parameters of a minimized program, after `check_untrained`; returns them as pservers have
        them.
        """
        with self._lock:
            if self._is_geo and dense.is_trained and not dense.is_local:
                self._local_dense[dense.spec.name] = dense.spec
                dense = dense._replace(spec=dense_on_pservers(dense.spec))
            self._dense = (*self._dense, dense)
            self._unregistered.append(dense.spec)
        return dense

    def declare_reduced(self, program: ReducedProgram) -> None:
        """Declares the program whose dense gradients the workers merge, after its dense parameters."""
        with self._lock:
            self._reduced = program

    def dense_names(self) -> set[str]:
        """Names of all dense parameters, trained or frozen."""
        return {name for dense in self._dense for name in dense.names}

    def trained_names(self) -> set[str]:
        """Names of the tables and dense parameters that programs train."""
        with self._lock:
            tables = {spec.name for spec in self._tables.values() if spec.rule != read_only.name}
        return tables | {name for dense in self._dense if dense.is_trained for name in dense.names}

    def name_of_table(self, table: Any) -> str:
        """The table of this name, or of this number in the order of declaration.

        Raises:
            PlanError: There is none.
        """
        names = list(self._tables)
        if isinstance(table, str) and table in names:
            return table
        if isinstance(table, int) and not isinstance(table, bool) and 0 <= table < len(names):
            return names[table]
        known = ", ".join(f"{number} {name!r}" for number, name in enumerate(names))
        raise PlanError(f"table {table!r}: no such table; should be one of: {known or 'none is declared'}")


def _check_same(known: TableSpec, spec: TableSpec) -> None:
    if differences := known.differences(spec):
        raise PlanError(f"table {spec.name!r}: another program declares it with {'; '.join(differences)}")
