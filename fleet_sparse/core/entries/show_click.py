"""Admission by score: an id gets a row once its shows and clicks weigh enough (Paddle's `ShowClickEntry`).

The score is `nonclick_coeff * (show - click) + click_coeff * click`. Names and defaults are those of Paddle's CTR
accessor, whose `embedx_threshold` is the threshold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..jit import kernel
from .policy import CLICK, KERNEL_TYPES, SHOW, EntryPolicy


def _scalars(settings: dict[str, float]) -> NDArray[np.float64]:
    return np.array([settings["threshold"], settings["nonclick_coeff"], settings["click_coeff"]], np.float64)


@kernel(*KERNEL_TYPES)
def _admit(
    hashes: NDArray[np.int64],
    totals: NDArray[np.float32],
    width: int,
    scalars: NDArray[np.float64],
    admitted: NDArray[np.uint8],
) -> None:
    for i in range(np.uint64(hashes.shape[0])):
        show, click = np.float64(totals[2 * i]), np.float64(totals[2 * i + 1])
        admitted[i] = scalars[1] * (show - click) + scalars[2] * click >= scalars[0]


show_click = EntryPolicy(
    name="show_click",
    statistics=(SHOW, CLICK),
    defaults=(("click_coeff", 1.0), ("nonclick_coeff", 0.1), ("threshold", 10.0)),
    scalars=_scalars,
    kernel=_admit,
)
