"""What the ops that we put into a Program are called, as `describe` shows them."""

LOOKUP = "fs_lookup"
PREFETCH = "fs_prefetch"
UPDATE = "fs_update"
