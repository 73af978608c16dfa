"""The lease of a shard: at any time at most one pserver answers for it."""
