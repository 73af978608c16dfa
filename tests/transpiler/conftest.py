from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle
import pytest


@pytest.fixture
def program() -> Iterator[Any]:
    """A fresh default main program."""
    paddle.enable_static()
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()), paddle.utils.unique_name.guard():
        yield main
