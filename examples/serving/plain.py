"""Predicts with the plain model, in a process that does not know fleet_sparse: `plain.py MODEL FEEDS.npz OUT.npy`."""

from __future__ import annotations

import sys

import numpy as np
from paddle import inference

model, feeds, out = sys.argv[1:]
predictor = inference.create_predictor(inference.Config(f"{model}.json", f"{model}.pdiparams"))
with np.load(feeds) as given:
    for name in predictor.get_input_names():
        predictor.get_input_handle(name).copy_from_cpu(given[name])
predictor.run()
np.save(out, predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu())
if "fleet_sparse" in sys.modules:
    sys.exit("fleet_sparse was imported")
