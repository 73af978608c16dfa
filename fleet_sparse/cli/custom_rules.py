"""Custom update rules for commands that read snapshots."""

from __future__ import annotations


def add_custom_rules() -> None:
    """Adds the update rules of FLEET_SPARSE_RULES, which specs in snapshots may name.

    Raises:
        SettingError: The rules cannot be added, or a `FLEET_SPARSE_*` variable has no meaning.
    """
    from fleet_sparse.custom_rules import add_rules
    from fleet_sparse.settings import Settings

    add_rules(Settings.from_environment().rules)
