"""The plugin as a fixture, for tests of every part that imports Paddle."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest

import fleet_sparse


@pytest.fixture
def plugin() -> Iterator[None]:
    """Installs the plugin in static mode, with new default programs and scope; uninstalls it afterwards."""
    paddle.enable_static()
    fleet_sparse.install()
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        yield
    fleet_sparse.uninstall()
