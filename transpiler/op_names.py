"""Names of the ops that fleet_sparse inserts into a Program, as `describe` shows them."""

LOOKUP = "fs_lookup"
PREFETCH = "fs_prefetch"
UPDATE = "fs_update"
SEGMENTS = "fs_segments"
