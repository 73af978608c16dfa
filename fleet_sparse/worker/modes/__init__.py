"""Modes of training: sync and async through the pservers, or geo, on the worker for a window of steps."""
