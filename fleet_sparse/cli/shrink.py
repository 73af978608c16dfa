"""`fleet-sparse shrink`: removes rows from the tables of a running job, and reports which rows go and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fleet_sparse.errors import SettingError

from . import snapshot_report as report
from .custom_rules import add_custom_rules
from .terminal import AS_IS, console, print_json

if TYPE_CHECKING:
    from fleet_sparse.core.criteria import Criterion, Removal

UnseenDays = Annotated[
    int | None, typer.Option(min=0, help="Remove rows for which more days ended since their last push.")
]
MinNorm = Annotated[float | None, typer.Option(min=0, help="Remove rows with a smaller L2 norm.")]
MinScore = Annotated[
    float | None, typer.Option(min=0, help="Remove rows with a lower score: of shows and clicks, or of counts.")
]
Tables = Annotated[list[str] | None, typer.Option("--table", help="Table that shrinks; may be repeated. Default: all.")]


def criteria_of(unseen_days: int | None, min_norm: float | None, min_score: float | None) -> list[Criterion]:
    """Returns the criteria that options give.

    Raises:
        SettingError: There is none.
    """
    from fleet_sparse.core.criteria import MIN_NORM, MIN_SCORE, UNSEEN_DAYS, Criterion

    given = ((UNSEEN_DAYS, unseen_days), (MIN_NORM, min_norm), (MIN_SCORE, min_score))
    criteria = [Criterion(name, float(value)) for name, value in given if value is not None]
    if not criteria:
        raise SettingError("shrink: no criterion is given. Give --unseen-days, --min-norm or --min-score")
    return criteria


def print_shrunk(removals: Sequence[Removal], unscored: Sequence[str]) -> None:
    """Prints which rows go, and the tables from which a score removes none because they have no scores."""
    console.print(report.shrunk_table(removals))
    if unscored:
        plural = len(unscored) > 1
        console.print(
            f"table{'s' * plural} {', '.join(map(repr, unscored))} {'have' if plural else 'has'} no scores, so that "
            "--min-score removes no rows: scores need an entry policy that counts",
            **AS_IS,
        )


def shrink(
    pservers: Annotated[
        str,
        typer.Argument(metavar="PSERVERS", help="host:port of all pservers, as PADDLE_PSERVERS_IP_PORT_LIST has them."),
    ],
    unseen_days: UnseenDays = None,
    min_norm: MinNorm = None,
    min_score: MinScore = None,
    decay: Annotated[
        float, typer.Option(min=0, max=1, help="Multiply shows and clicks by this first; 0.98 is Paddle's rate.")
    ] = 1.0,
    table: Tables = None,
    dry_run: Annotated[bool, typer.Option(help="Report which rows would go, and change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Removes rows from the tables of a running job, and reports how many rows go and why.

    Each pserver removes its rows between two requests; workers wait meanwhile. A row that two criteria select counts
    for the first one.
    """
    from fleet_sparse.settings import Settings
    from fleet_sparse.tools.live_shrink import shrink as shrink_live

    add_custom_rules()
    criteria = criteria_of(unseen_days, min_norm, min_score)
    endpoints = [each.strip() for each in pservers.split(",")]
    removals, unscored = shrink_live(
        endpoints, criteria, Settings.from_environment(), decay=decay, tables=table or (), dry_run=dry_run
    )
    if as_json:
        print_json({"removed": report.removed_json(removals), "is_dry_run": dry_run})
    else:
        print_shrunk(removals, unscored if min_score is not None else ())
