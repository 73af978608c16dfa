"""The log of a shard: every change, written before it is applied. `docs/log.md` has the format."""
