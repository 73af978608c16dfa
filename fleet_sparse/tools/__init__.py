"""Programs around a job: what it takes, whether it trains exactly, and what its snapshots hold."""
