"""Snapshots: what a pserver's shards hold, in files that any number of pservers load. `docs/snapshot.md`."""
