"""Dense arrays that are larger than a frame: the same bits as in one frame."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.jobs import outputs_of

SMALL = {"FLEET_SPARSE_MAX_FRAME_BYTES": str(1 << 20)}


@pytest.mark.parametrize(
    ("num_workers", "variables"),
    [
        pytest.param(2, {}, id="sync"),
        *(
            pytest.param(num_workers, variables, id=name, marks=pytest.mark.slow)
            for num_workers, variables, name in (
                (1, {}, "one worker"),
                (2, {"FLEET_SPARSE_DENSE_GRADS_DTYPE": "bfloat16"}, "16 bits"),
                (1, {"K_STEPS": "2"}, "geo"),
            )
        ),
    ],
)
def test_arrays_larger_than_a_frame_have_the_bits_of_others(
    tmp_path: Path, num_workers: int, variables: dict[str, str]
) -> None:
    found = []
    for name, frames in (("whole", {}), ("divided", SMALL)):
        (tmp_path / name).mkdir()
        outputs = outputs_of(
            "large_dense.py", tmp_path / name, num_workers, of_pservers={**frames, **variables}, **frames, **variables
        )
        found.append([re.findall(r"^(?:loss|weights) .*$", output, re.MULTILINE) for output in outputs])
    assert found[0] == found[1]
    for lines in found[1]:
        assert len(lines) == 5
        _, saved, loaded = lines[-1].split()
        assert saved == loaded
