"""How fast is it? Each benchmark states its question, measures by turns with its peer, and records what it found.

`scripts/bench` runs them and writes docs/benchmarks.md.
"""
