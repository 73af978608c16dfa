"""How a worker trains: through the pservers in sync and async, or by itself for a window of steps."""
