"""The shard: the one way in which its tables change."""
