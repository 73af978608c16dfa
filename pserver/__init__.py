"""A pserver: the rows of its shard of every table, and who may change them."""
