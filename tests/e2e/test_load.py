"""Loading and shrinking while pservers and several workers run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.jobs import outputs_of


@pytest.mark.guarantee("V5")
@pytest.mark.parametrize("row_shards", ["", "1"], ids=["all pservers have both", "dense beside the rows"])
def test_workers_go_back_together_to_what_was_saved(tmp_path: Path, row_shards: str) -> None:
    variables = {"FLEET_SPARSE_ROW_SHARDS": row_shards} if row_shards else {}
    outputs = outputs_of("load_model.py", tmp_path, num_servers=3, of_pservers=variables, **variables)
    for output in outputs:
        after = re.findall(r"^after (\S+)", output, re.MULTILINE)
        assert len(set(after)) == 5
        assert after[:5] == after[5:]
    assert ["refused:" in output for output in outputs] == [True, False]
    (counts,) = set(re.findall(r"^rows (\d+) and then (\d+)", outputs[0], re.MULTILINE))
    assert int(counts[0]) == 60
    assert 0 < int(counts[1]) <= 60
