"""The user's own update rules, as far as commands need them."""

from __future__ import annotations


def add_own_rules() -> None:
    """Adds those that FLEET_SPARSE_RULES names: specs in snapshots may name them.

    Raises:
        SettingError: They cannot be added, or an environment variable of ours has no meaning.
    """
    from fleet_sparse.custom_rules import add_rules
    from fleet_sparse.settings import Settings

    add_rules(Settings.from_environment().rules)
