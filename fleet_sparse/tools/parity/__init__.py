"""Trains one model on pservers and in plain Paddle, so that the losses can be compared."""
