"""The client: requests to every shard and their replies, over any channel."""
