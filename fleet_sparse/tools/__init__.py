"""Programs around a job: what it needs, whether it trains exactly, and what its snapshots hold."""
