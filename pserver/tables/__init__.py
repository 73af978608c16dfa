"""The kinds of tables that a shard holds."""
