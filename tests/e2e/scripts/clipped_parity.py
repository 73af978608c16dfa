"""The command of fleet_sparse.tools.parity.training, with optimizers that clip gradients and then decay weights."""

from __future__ import annotations

import paddle
from paddle.nn import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue

from fleet_sparse.tools.parity import training


def clip_values(self, params_grads):
    """Paddle 3.3 has no clip by value for static programs in its default IR; this is its dygraph one."""
    return [(parameter, paddle.clip(grad, min=self.min, max=self.max)) for parameter, grad in params_grads]


def optimizer_with(clip):
    decay = paddle.regularizer.L2Decay(0.05)
    return lambda: paddle.optimizer.SGD(0.5, grad_clip=clip, weight_decay=decay)


ClipGradByValue._pir_clip = clip_values
training.OPTIMIZERS.update(
    unclipped=optimizer_with(None),
    by_value=optimizer_with(ClipGradByValue(0.01, -0.005)),
    by_norm=optimizer_with(ClipGradByNorm(0.02)),
    by_global_norm=optimizer_with(ClipGradByGlobalNorm(0.05)),
)
training.main()
