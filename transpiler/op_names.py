"""Names of the ops that fleet_sparse inserts into a Program, as `describe` shows them."""

LOOKUP = "fs_lookup"
PREFETCH = "fs_prefetch"
UPDATE = "fs_update"
SEGMENTS = "fs_segments"

RAGGED = "fleet_sparse_ragged"
"""Attribute of an op of segments whose one field is ragged, without weights and padding: its combiner."""
