"""`paddle.Model.fit` with tables."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle.distributed import fleet

from support.dygraph import FIELDS, Model, num_rows, plain_layer, sparse_layer


class _Examples(paddle.io.Dataset):
    def __getitem__(self, index):
        return np.array([index % 50, index * 7 % 50, index * 3 % 50]), np.array([index % 2], np.float32)

    def __len__(self):
        return 64


class _Losses(paddle.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, step, logs=None):
        self.values.append(float(logs["loss"][0]))


def _fit(network, optimizer):
    losses = _Losses()
    model = paddle.Model(network)
    model.prepare(optimizer, paddle.nn.BCEWithLogitsLoss())
    model.fit(_Examples(), batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[losses])
    return model, losses.values


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # of paddle.Model itself
@pytest.mark.usefixtures("job")
def test_fit_trains_as_plain_paddle_and_evaluates():
    network = Model(plain_layer())
    _, expected = _fit(network, paddle.optimizer.Adagrad(0.1, parameters=network.parameters()))
    with paddle.utils.unique_name.guard():
        network = Model(sparse_layer())
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adagrad(0.1, parameters=network.parameters()))
    fleet.init_worker()
    model, losses = _fit(network, optimizer)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    num_trained = num_rows()
    assert model.evaluate(_Examples(), batch_size=8, verbose=0)["loss"][0] < losses[0]
    assert model.predict_batch([np.zeros((1, FIELDS), np.int64)])[0].shape == (1, 1)
    assert num_rows() == num_trained
