"""PyTorch: rows of `nn.Embedding(sparse=True)` looked up and updated. Runs in the venv of `baselines.TORCH`.

    echo 20 | .venv-torch/bin/python benchmarks/baselines/torch_rows.py --rule adagrad --directory work

For each line of its standard input, a number of cycles, it writes one line: `@@` and the seconds of each, as JSON; for
the line `rows` those of the first ids as they are then. What it works on lies in the directory: `initial.npy`, the
table; `batches.npy`, ids by cycle; `grads.npy`, of every cycle.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

NUM_LOOKED_UP = 100
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-6}),
    "adam": (torch.optim.SparseAdam, {}),
}


def main() -> None:
    """Runs the number of cycles that each line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rule", choices=OPTIMIZERS, required=True)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    initial, batches, grads = (
        torch.from_numpy(np.load(options.directory / f"{name}.npy")) for name in ("initial", "batches", "grads")
    )
    embedding = torch.nn.Embedding.from_pretrained(initial, freeze=False, sparse=True)
    kind, settings = OPTIMIZERS[options.rule]
    optimizer = kind(embedding.parameters(), lr=options.learning_rate, **settings)
    num_done = 0
    for line in sys.stdin:
        if line.strip() == "rows":
            told = embedding.weight.detach()[batches[0][:NUM_LOOKED_UP]].tolist()
        else:
            told = []
            for _ in range(int(line)):
                begun = time.perf_counter()
                embedding(batches[num_done % len(batches)]).backward(grads)
                optimizer.step()
                optimizer.zero_grad()
                told.append(time.perf_counter() - begun)
                num_done += 1
        print(f"@@{json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main()
