"""Row batches, and the sources that fill them."""
