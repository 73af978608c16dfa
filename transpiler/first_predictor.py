"""Opens a predictor before the first Python op of a process.

Paddle 3.3 registers the dialect of Python ops in a way that ends the process (SIGABRT) when the first
`paddle.inference.create_predictor` follows the first Python op. With one predictor before it, later ones work.
"""

from __future__ import annotations

import tempfile
from functools import cache

import numpy as np
import paddle


@cache
def open_first_predictor() -> None:
    """Opens a predictor of one op, once in a process; names and default programs of the user do not change."""
    from paddle import inference
    from paddle.static.io import save_inference_model

    scope, program = paddle.static.Scope(), paddle.static.Program()
    with (
        tempfile.TemporaryDirectory(prefix="fleet_sparse") as directory,
        paddle.static.scope_guard(scope),
        paddle.static.program_guard(program, paddle.static.Program()),
        paddle.utils.unique_name.guard(),
    ):
        x = paddle.static.data("x", [1], "float32")
        zero = paddle.nn.initializer.Constant(0)
        w = paddle.static.create_parameter([1], "float32", name="w", default_initializer=zero)
        scope.var("w").get_tensor().set(np.zeros(1, np.float32), paddle.CPUPlace())
        executor = paddle.static.Executor(paddle.CPUPlace())
        save_inference_model(f"{directory}/one", [x], [x + w], executor, program=program)
        config = inference.Config(f"{directory}/one.json", f"{directory}/one.pdiparams")
        config.disable_gpu()
        config.disable_glog_info()
        config.disable_mkldnn()
        inference.create_predictor(config)
