"""What the ops that we put into a Program are called, as `describe` shows them."""

LOOKUP = "fs_lookup"
PREFETCH = "fs_prefetch"
SPARSE_UPDATE = "fs_sparse_update"
DENSE_UPDATE = "fs_dense_update"
