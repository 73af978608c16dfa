"""How fast is it? Each benchmark states its question, interleaves ours with its baselines, and records every run.

`scripts/bench` runs them; docs/benchmarks.md is written from the records.
"""
