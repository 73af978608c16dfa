"""Predicts with a dictionary and the split network, in a process that does not know fleet_sparse.

`from_dictionary.py SERVE DICTIONARY FEEDS.npz OUT.npy`, where `dictionary_reader` is the reader of docs/dictionary.md.
The dense values of the network are those of the save of its model, so the dictionary has to be of the same snapshot.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from dictionary_reader import Dictionary  # type: ignore[import-not-found]
from paddle import inference

serve, exported, feeds, out = map(Path, sys.argv[1:])
model = json.loads((serve / "SERVING.json").read_text())
index = json.loads((exported / "DICTIONARY.json").read_text())
if index["number"] != model["number"]:
    sys.exit(f"the dictionary is of snapshot {index['number']}, the network of snapshot {model['number']}")
tables = {each["name"]: Dictionary([exported / name for name in each["files"]]) for each in index["tables"]}

inputs = dict(np.load(feeds))
ids_of: dict[str, list[np.ndarray]] = {}
for lookup in model["lookups"]:
    ids_of.setdefault(lookup["table"], []).append(inputs[lookup["feed"]].reshape(-1))
unique = {table: np.unique(np.concatenate(ids)) for table, ids in ids_of.items()}
for table, ids in unique.items():
    inputs[f"{table}@rows"] = tables[table].rows(ids)
for number, lookup in enumerate(model["lookups"]):
    positions = np.searchsorted(unique[lookup["table"]], inputs[lookup["feed"]])
    inputs[f"{lookup['table']}@index.{number}"] = positions

network = serve / "networks" / model["networks"] / "network"
predictor = inference.create_predictor(inference.Config(f"{network}.json", f"{network}.pdiparams"))
for name in predictor.get_input_names():
    predictor.get_input_handle(name).copy_from_cpu(np.ascontiguousarray(inputs[name]))
predictor.run()
np.save(out, predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu())
if "fleet_sparse" in sys.modules:
    sys.exit("fleet_sparse was imported")
