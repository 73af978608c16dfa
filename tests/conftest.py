from __future__ import annotations

from hypothesis import settings

from support.pserver_job import pserver_job

__all__ = ["pserver_job"]

# How long an example takes is not what a test is about: the first one may compile a kernel, and the machine is shared.
settings.register_profile("fleet_sparse", deadline=None)
settings.load_profile("fleet_sparse")
