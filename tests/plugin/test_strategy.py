from __future__ import annotations

import copy
from typing import Any

import paddle
import pytest
from google.protobuf.message import Message
from paddle.distributed import fleet

from fleet_sparse.core.mode import Mode
from fleet_sparse.errors import PlanError
from fleet_sparse.plugin.accepted_fields import reason_for
from fleet_sparse.plugin.strategy import OBEYED, PserverStrategy, read_strategy


def strategy_with(**values: Any) -> Any:
    strategy = PserverStrategy()
    for name, value in values.items():
        setattr(strategy, name, value)
    return strategy


NO_PARALLELISM = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1}


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({}, Mode("async")),
        ({"a_sync": False}, Mode("sync", "avg")),
        ({"a_sync": False, "gradient_scale_configs": {"scale_strategy": "sum"}}, Mode("sync", "sum")),
        ({"a_sync_configs": {"k_steps": 10}}, Mode("geo", "avg", None, 10)),
        ({"a_sync_configs": {"k_steps": 2}, "delta_scale": "sum"}, Mode("geo", "sum", None, 2)),
        ({"a_sync_configs": {"k_steps": -1}}, Mode("async")),  # Paddle's default
        ({"max_step_lag": 0}, Mode("async", max_step_lag=0)),
        ({"hybrid_configs": NO_PARALLELISM}, Mode("async")),
        ({"build_strategy": paddle.static.BuildStrategy()}, Mode("async")),
        ({"a_sync": False, "dense": "all_reduce"}, Mode("sync", dense="all_reduce")),
    ],
)
def test_mode_is_read_from_the_strategy(values, mode):
    assert read_strategy(strategy_with(**values)).mode == mode


def test_paddles_own_strategy_is_async_by_default():
    assert read_strategy(fleet.DistributedStrategy()).mode == Mode("async")


def test_examples_input_and_strict_rules_are_read():
    reading = read_strategy(PserverStrategy(strict_rules=True))
    reading_in_sync = read_strategy(strategy_with(a_sync=False, examples_input="label"))
    assert (reading.strict_rules, reading_in_sync.examples_input) == (True, "label")


def test_strategy_survives_the_copy_that_fleet_makes():
    strategy = copy.deepcopy(strategy_with(a_sync=False, examples_input="label"))
    assert read_strategy(strategy) == read_strategy(strategy_with(a_sync=False, examples_input="label"))


@pytest.mark.parametrize("lag", [-1, 1.5, "2", True])
def test_lag_that_is_no_number_of_steps_is_refused(lag):
    with pytest.raises(PlanError, match=r"PserverStrategy\.max_step_lag"):
        PserverStrategy(max_step_lag=lag)


def test_delta_scale_without_a_meaning_is_refused():
    with pytest.raises(PlanError, match=r"PserverStrategy\.delta_scale.*'mean'"):
        PserverStrategy(delta_scale="mean")


def test_dense_without_a_meaning_is_refused():
    with pytest.raises(PlanError, match=r"PserverStrategy\.dense.*'workers'"):
        PserverStrategy(dense="workers")


@pytest.mark.guarantee("R8")
@pytest.mark.parametrize(
    "values", [{"a_sync_configs": {"k_steps": 3}}, {"a_sync": False, "dense": "all_reduce"}], ids=["geo", "all_reduce"]
)
def test_dtype_of_dense_gradients_is_refused_without_pushes(values):
    assert read_strategy(strategy_with(), "bfloat16").mode == Mode("async", dense_grads_dtype="bfloat16")
    with pytest.raises(PlanError, match="FLEET_SPARSE_DENSE_GRADS_DTYPE: is 'bfloat16'"):
        read_strategy(strategy_with(**values), "bfloat16")


def test_field_without_a_meaning_is_refused():
    with pytest.raises(TypeError, match="max_lag"):
        strategy_with(max_lag=3)


@pytest.mark.parametrize(
    "values",
    [
        {"a_sync": False, "max_step_lag": 3},
        {"a_sync": False, "a_sync_configs": {"k_steps": 3}},
        {"max_step_lag": 3, "a_sync_configs": {"k_steps": 3}},
        {"gradient_scale_configs": {"scale_strategy": "sum"}},
        {"a_sync": False, "gradient_scale_configs": {"scale_strategy": "customized"}},
        {"a_sync": False, "delta_scale": "sum"},
        {"dense": "all_reduce"},
        {"dense": "all_reduce", "a_sync_configs": {"k_steps": 3}},
        {"dense": "all_reduce", "a_sync": False, "refuse_ids_past_size": True},
        {"delta_scale": "sum"},
        {"examples_input": "label"},
        {"refuse_ids_past_size": True, "a_sync_configs": {"k_steps": 3}},
        {"a_sync": False, "gradient_scale_configs": {"scale_strategy": "sum"}, "examples_input": "label"},
    ],
)
@pytest.mark.guarantee("X1")
def test_switches_that_contradict_each_other_are_refused(values):
    with pytest.raises(PlanError, match="Strategy"):
        read_strategy(strategy_with(**values))


@pytest.mark.parametrize(
    "switch", ["amp", "recompute", "gradient_merge", "sharding", "pipeline", "localsgd", "dgc", "lamb", "lars"]
)
def test_switch_that_is_on_is_refused_by_name(switch):
    with pytest.raises(PlanError, match=f"DistributedStrategy.{switch}:"):
        read_strategy(strategy_with(**{switch: True}))


@pytest.mark.parametrize(
    ("configs", "name", "value"),
    [
        ("a_sync_configs", "use_ps_gpu", 1),
        ("gradient_scale_configs", "scale_gradient", True),
        ("gradient_merge_configs", "k_steps", 4),
        ("hybrid_configs", "dp_degree", 2),
        ("hybrid_configs", "mp_degree", 2),
        ("hybrid_configs", "pp_degree", 2),
        ("hybrid_configs", "sharding_degree", 4),
    ],
)
def test_configuration_that_is_not_obeyed_is_refused_by_name(configs, name, value):
    with pytest.raises(PlanError, match=rf"DistributedStrategy.{configs}\['{name}'\]"):
        read_strategy(strategy_with(**{configs: {name: value}}))


def test_build_strategy_that_is_not_obeyed_is_refused_by_name():
    build_strategy = paddle.static.BuildStrategy()
    build_strategy.enable_inplace = False
    with pytest.raises(PlanError, match=r"DistributedStrategy\.build_strategy\.enable_inplace"):
        read_strategy(strategy_with(build_strategy=build_strategy))


@pytest.mark.parametrize("make", [fleet.DistributedStrategy, PserverStrategy])
def test_build_strategy_that_paddle_drops_is_refused_by_name(plugin, make):
    build_strategy = paddle.static.BuildStrategy()
    build_strategy.sync_batch_norm = True
    strategy = make()
    strategy.build_strategy = build_strategy
    with pytest.raises(PlanError, match=r"DistributedStrategy\.build_strategy\.sync_batch_norm"):
        read_strategy(copy.deepcopy(strategy))


# Every field of Paddle's message, also those of a later version.


def leaves(descriptor: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for field in descriptor.fields:
        if field.message_type and not field.is_repeated:
            found += leaves(field.message_type, (*path, field.name))
        else:
            found.append((*path, field.name))
    return found


def change(message: Message, name: str) -> None:
    """Changes the value of a field."""
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.is_repeated and field.message_type:
        value.add()
    elif field.is_repeated:
        value.append("x" if isinstance(field.default_value, str) or field.cpp_type == field.CPPTYPE_STRING else 1)
    elif field.enum_type:
        setattr(message, name, next(each.number for each in field.enum_type.values if each.number != value))
    else:
        setattr(
            message,
            name,
            not value if isinstance(value, bool) else f"{value}x" if isinstance(value, str) else value + 7,
        )


@pytest.mark.parametrize("path", leaves(fleet.DistributedStrategy().strategy.DESCRIPTOR), ids=".".join)
@pytest.mark.guarantee("X1")
def test_every_field_is_obeyed_accepted_aloud_or_refused(path, caplog):
    strategy = fleet.DistributedStrategy()
    if path[0] == "build_strategy":  # its defaults are not those of the message
        strategy.build_strategy = paddle.static.BuildStrategy()
    message = strategy.strategy
    for name in path[:-1]:
        message = getattr(message, name)
    change(message, path[-1])
    if ".".join(path) in OBEYED:
        return
    if path == ("downpour_table_param",):  # test_accessor_config.py
        read_strategy(strategy)
        return
    if reason_for(".".join(path)):
        read_strategy(strategy)
        (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert path[-1] in record.getMessage()
        return
    with pytest.raises(PlanError) as caught:
        read_strategy(strategy)
    assert all(name in str(caught.value) for name in path)
