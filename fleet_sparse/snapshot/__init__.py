"""The files of a snapshot: their format, and the store that they lie in. Knows no shard. `docs/snapshot.md`."""
