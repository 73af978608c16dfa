"""The model zoo: click models, the data they read, and one training script for all of them.

`python -m fleet_sparse.models.train --help` trains in one process; under `fleetrun` the same command trains on
parameter servers. A model is a function from feeds to logits; its flagged embedding is the only line that depends
on sparse tables.
"""
