"""Paddle's static graph: what a Program contains and how it is run."""
