"""Options of `models/train.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet_sparse.core.mode import ASYNC, GEO, SYNC
from fleet_sparse.core.row_bound import DEFAULT_SHARE
from fleet_sparse.counts import count_from

from . import synthetic
from .paddlerec import read_config
from .zoo import MODELS

OPTIMIZERS = ("adagrad", "adam", "sgd")


class TrainOptions(argparse.Namespace):
    """Options of the command line."""

    config: Path | None
    config_unused: list[str]
    """Settings of the configuration that change nothing."""
    model: str
    data: list[str]
    field_sizes: list[str] | None
    drift_at: int | None
    slots: list[str] | None
    num_dense: int
    epochs: int
    batch_size: int
    dim: int
    hidden: list[int]
    optimizer: str
    learning_rate: float
    seed: int
    mode: str
    max_step_lag: int | None
    k_steps: int
    max_row_lag: int | None
    max_row_lag_share: float | None
    max_row_drift: float | None
    cache_rows: int | None
    cache_min_dim: int
    plain: bool
    initial_rows: str
    save: str | None
    load: str | None
    metrics: Path | None


def parse(arguments: Sequence[str] | None) -> TrainOptions:
    """Parses a command line; exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fleet_sparse.models.train",
        description="Trains a click model: in one process, under fleetrun on parameter servers, or in plain Paddle.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "-m", "--config", metavar="CONFIG.yaml", type=Path, help="configuration of PaddleRec; other options override it"
    )
    add("--model", choices=list(MODELS), default="deepfm")
    add(
        "--data",
        nargs="+",
        metavar="DATA",
        help="flights | synthetic [EXAMPLES] | criteo TRAIN [TEST] | slots TRAIN [TEST]: files, or directories of "
        "files; without TEST every tenth batch of TRAIN is held out. Default: flights, or synthetic for a model that "
        "does not train on fields with one label",
    )
    add(
        "--field-sizes",
        nargs="+",
        metavar="SIZES",
        help="synthetic: criteo for the sizes of Criteo's fields, criteo NUM_IDS for these scaled to about NUM_IDS; "
        "default: 10 to 10 million",
    )
    add(
        "--drift-at",
        type=count_from(1),
        metavar="BATCH",
        help="synthetic: batch, counted over all workers, from which on other values are the frequent ones",
    )
    add("--slots", type=lambda text: text.split(","), help="slots that are fields, as 1,2,7; default: 1 to 26")
    add("--num-dense", type=count_from(1), default=13, help="number of dense_feature values in slot files")
    add("--epochs", type=count_from(0), default=1, help="0 only evaluates")
    add("--batch-size", type=count_from(1), default=512, help="examples per step of each worker")
    add("--dim", type=count_from(1), default=8, help="number of floats of a row")
    add("--hidden", type=count_from(1), nargs="*", default=[64, 32], help="widths of the deep layers")
    add("--optimizer", choices=OPTIMIZERS, default="adagrad")
    add("--learning-rate", type=float, default=0.01)
    add(
        "--seed",
        type=count_from(0),
        default=0,
        help="seed of data order and dense parameters; FLEET_SPARSE_SEED is that of rows",
    )
    add("--mode", choices=[SYNC, ASYNC, GEO], default=ASYNC, help="training mode")
    add("--max-step-lag", type=count_from(0), help="async: steps that a worker may be ahead of the slowest")
    add("--k-steps", type=count_from(0), default=0, help="geo: steps between two exchanges with the pservers")
    add("--max-row-lag", type=count_from(0), help="caches rows that lack at most this number of updates of others")
    add(
        "--max-row-lag-share",
        type=_share,
        default=DEFAULT_SHARE,
        help="and at most this share of all updates of the row; none for any",
    )
    add("--max-row-drift", type=float, help="caches rows that lack updates of at most this distance")
    add("--cache-rows", type=count_from(1), help="largest number of cached rows of a table; default: by memory")
    add("--cache-min-dim", type=count_from(1), default=1, help="smallest dim of a table whose rows are cached")
    add("--plain", action="store_true", help="plain Paddle: local tables, no plugin, one process")
    add(
        "--initial-rows",
        choices=["plugin", "zeros"],
        default="plugin",
        help="first values of the rows of --plain: those of tables on pservers, or zeros",
    )
    add("--save", metavar="DIR", help="directory where every pserver saves its rows")
    add("--load", metavar="DIR", help="directory from which every pserver loads its rows")
    add("--metrics", metavar="FILE.json", type=Path, help="file for the results; see models/train.py, Metrics")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    config = parser.parse_args(arguments).config
    unused: list[str] = []
    if config is not None:
        try:
            of_config, unused = read_config(config)
        except (OSError, ValueError) as error:
            parser.error(f"--config: {error}")
        arguments = of_config + arguments
    options = parser.parse_args(arguments, namespace=TrainOptions())
    options.config_unused = unused
    if options.data is None:
        options.data = ["flights" if MODELS[options.model].reads_clicks else "synthetic"]
    _check(parser, options)
    _check_draw(parser, options)
    _check_cache(parser, options)
    return options


def _share(text: str) -> float | None:
    return None if text == "none" else float(text)


def _check(parser: argparse.ArgumentParser, options: TrainOptions) -> None:
    name, *rest = options.data
    if name != "synthetic" and not MODELS[options.model].reads_clicks:
        parser.error(f"--model {options.model}: trains on examples of its own shape. Write --data synthetic")
    wanted = {"flights": (0, 0), "synthetic": (0, 1), "criteo": (1, 2), "slots": (1, 2)}
    if name not in wanted:
        parser.error(f"--data {name}: no such data, should be one of {', '.join(wanted)}")
    least, most = wanted[name]
    if not least <= len(rest) <= most:
        parser.error(f"--data {name}: {len(rest)} arguments follow, should be {least} to {most}")
    if options.model == "mmoe" and not options.hidden:
        parser.error("--hidden: has no width, should have at least one with --model mmoe, that of the towers")
    if name == "synthetic" and rest and not (rest[0].isdecimal() and int(rest[0])):
        parser.error(f"--data synthetic: {rest[0]!r} should be a number of examples")
    if options.max_step_lag is not None and options.mode != ASYNC:
        parser.error(f"--max-step-lag: has no meaning in {options.mode} training. Leave it out")
    if (options.k_steps > 0) != (options.mode == GEO):
        parser.error(f"--k-steps: is {options.k_steps}, should be above 0 with --mode {GEO} and 0 without")
    if options.plain and (options.mode != ASYNC or options.max_step_lag is not None):
        parser.error("--plain: has one worker and no pservers. Leave --mode and its options out")
    if options.plain and (options.save or options.load):
        parser.error("--plain: has no pservers that could save or load. Leave --save and --load out")


def _check_draw(parser: argparse.ArgumentParser, options: TrainOptions) -> None:
    for option, value in (("--field-sizes", options.field_sizes), ("--drift-at", options.drift_at)):
        if value is not None and (options.data[0] != "synthetic" or MODELS[options.model].draw is not synthetic.draw):
            parser.error(f"{option}: is for --data synthetic and models of clicks. Leave it out")
    if options.field_sizes is not None:
        first, *num_ids = options.field_sizes
        if first != "criteo" or len(num_ids) > 1 or not all(each.isdecimal() and int(each) for each in num_ids):
            parser.error(f"--field-sizes: is {' '.join(options.field_sizes)!r}, should be 'criteo' or 'criteo NUM_IDS'")


def _check_cache(parser: argparse.ArgumentParser, options: TrainOptions) -> None:
    has_cache = options.max_row_lag is not None or options.max_row_drift is not None
    for option, is_given in (("rows", options.cache_rows is not None), ("min-dim", options.cache_min_dim > 1)):
        if is_given and not has_cache:
            parser.error(f"--cache-{option}: no rows are cached. Write --max-row-drift or --max-row-lag, too")
    if options.plain and has_cache:
        parser.error("--plain: has no pservers whose rows could be cached. Leave --max-row-lag and --max-row-drift out")
