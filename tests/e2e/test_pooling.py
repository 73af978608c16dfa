"""Fields of variable length on pservers, with several workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from support.jobs import numbers, outputs_of


def test_ragged_and_padded_fields_train_alike_on_2_pservers(tmp_path: Path) -> None:
    for output in outputs_of("pooling.py", tmp_path, num_workers=2, num_servers=2):
        losses, differences = numbers("loss", output), numbers("difference", output)
        assert len(losses) == 30, output
        assert max(differences) < 1e-6
        assert np.mean(losses[-5:]) < 0.8 * losses[0]
