"""What tables are and what is done to their rows: no I/O, no threads, no paddle."""
