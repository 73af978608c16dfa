"""Storage of rows in memory: table stores, their index and columns, and copy-on-write views."""
