"""Tools around a job: they plan it or look at it, and are no part of its steps."""
