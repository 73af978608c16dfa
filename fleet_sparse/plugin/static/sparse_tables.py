"""Finds the sparse parameters of a program that are tables on the pservers, and declares those tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import paddle
from paddle.base.libpaddle import pir

from fleet_sparse.core.embedding_spec import EmbeddingSpec
from fleet_sparse.errors import PlanError
from fleet_sparse.transpiler.sparse_parameter import SparseParameter, first_value_of, sparse_parameters

from ..optimizer_config import read_decay

logger = logging.getLogger(__name__)


def tables_of(
    program: pir.Program, startup_program: pir.Program, known: Mapping[str, EmbeddingSpec], dense: Sequence[str] = ()
) -> dict[str, EmbeddingSpec]:
    """The tables that `paddle.nn.Embedding(sparse=True)` and its functional form declare in `program`, by name.

    A parameter that other ops read too stays a dense parameter, after a warning.

    Args:
        program: Is not changed.
        startup_program: Initializes the parameters of `program`.
        known: Tables of other programs.
        dense: Names, or patterns such as `user_*`, of parameters that stay dense.

    Raises:
        PlanError: The first value of a row is not known, or cannot be computed from its id alone.
    """
    tables = {}
    for parameter in sparse_parameters(program):
        name = parameter.name
        if any(fnmatchcase(name, pattern) for pattern in dense) or parameter.weight.dtype != paddle.float32:
            continue
        if parameter.other_users:
            logger.warning(
                "embedding %r has sparse=True and stays a dense parameter, because %s reads it, too, or looks rows up "
                "inside control flow",
                name,
                ", ".join(sorted(set(parameter.other_users))),
            )
            continue
        tables[name] = _table_of(parameter, startup_program, known)
    return tables


def _table_of(
    parameter: SparseParameter, startup_program: pir.Program, known: Mapping[str, EmbeddingSpec]
) -> EmbeddingSpec:
    name, weight = parameter.name, parameter.weight
    first = first_value_of(startup_program, name)
    if first is None and name in known:
        return known[name]
    if first is None or isinstance(first, str):
        what = "is not in the startup program" if first is None else f"is the op {first!r}"
        raise PlanError(
            f"table {name!r}: its initializer {what}, should be Constant, Uniform, Normal or another one of numbers "
            "alone. Give minimize the startup program with which the layer was built, give the layer another "
            f"initializer, or keep it a dense parameter: PserverStrategy(dense_embeddings=[{name!r}])"
        )
    num_ids, dim = (int(size) for size in weight.shape)
    return EmbeddingSpec(
        name=name,
        dim=dim,
        initializer=first.initializer,
        seed=first.seed,
        size=num_ids,
        is_bounded=True,
        learning_rate=float((weight.optimize_attr or {}).get("learning_rate", 1.0)),
        is_trainable=not weight.stop_gradient,
        decay=read_decay(f"table {name!r}: ParamAttr regularizer", weight.regularizer),
        need_clip=getattr(weight, "need_clip", True) is not False,
    )
