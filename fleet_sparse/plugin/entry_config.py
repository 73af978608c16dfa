"""EntryConfig: what `entry=` of a lookup asks for, given as Paddle's classes or as `fleet_sparse.entry`."""

from __future__ import annotations

from typing import Any, NamedTuple

from paddle.distributed import CountFilterEntry, ProbabilityEntry, ShowClickEntry

from fleet_sparse.core.entries import CLICK, ENTRIES, EXACT, SHOW, Entry, checked
from fleet_sparse.errors import PlanError

from .active_session import active

_WRITE = (
    "Write a CountFilterEntry, ProbabilityEntry or ShowClickEntry of paddle.distributed, or fleet_sparse.entry(policy)"
)


class EntryConfig(NamedTuple):
    """Entry policy of a lookup; `entry` makes one."""

    entry: Entry
    show_click: tuple[str, str] | None = None
    """Names of the inputs that hold shows and clicks of each example, if the policy reads them."""


def entry(
    policy: str,
    *,
    counter: str = EXACT,
    num_ids: int = 0,
    show: str | None = None,
    click: str | None = None,
    **settings: float,
) -> EntryConfig:
    """Says which ids of a table get a row, as the `entry` of a lookup.

    Args:
        policy: "count_filter", "probability", "show_click", or the name of a policy in the module that
            FLEET_SPARSE_RULES names.
        counter: "exact", or "sketch" for counters in fixed memory that ids share: some ids get a row too early, and
            with `look_ahead` perhaps a step later than without.
        num_ids: Number of distinct ids without a row that a sketch is made for, which takes about 12 bytes for each.
        show: Name of the input with the shows of each example, for a policy that reads them.
        click: Name of the input with its clicks.
        **settings: Settings of the policy; the others have their defaults.

    Raises:
        PlanError: Policy, counter or a setting is unknown, a value is out of its range, or inputs are missing.
    """
    active()  # has added the policies of the user's module
    try:
        made = checked(Entry(policy, tuple(settings.items()), counter, num_ids))
    except ValueError as error:
        raise PlanError(str(error)) from None
    reads = {SHOW, CLICK} & set(ENTRIES[policy].statistics)
    if not reads and (show, click) == (None, None):
        return EntryConfig(made)
    if not reads or show is None or click is None:
        needs = "needs the names of both inputs" if reads else "reads neither. Leave them out"
        raise PlanError(f"entry {policy!r}: show is {show!r} and click is {click!r}, it {needs}")
    return EntryConfig(made, (show, click))


def read_entry(where: str, given: Any) -> EntryConfig | None:
    """Returns what `entry=` of a lookup asks for; None for no entry.

    Raises:
        PlanError: It is something else.
    """
    if given is None or isinstance(given, EntryConfig):
        return given
    try:
        if isinstance(given, CountFilterEntry):
            return entry("count_filter", threshold=float(given._count_filter))
        if isinstance(given, ProbabilityEntry):
            return entry("probability", probability=float(given._probability))
        if isinstance(given, ShowClickEntry):
            return entry("show_click", show=given._show_name, click=given._click_name)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    raise PlanError(f"{where}: entry is {type(given).__name__}, which is not supported. {_WRITE}")
