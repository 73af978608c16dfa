"""Where the rows of a batch come from."""
