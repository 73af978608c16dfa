from __future__ import annotations

import os

from hypothesis import settings

from fleet_sparse.settings import PREFIX
from support.pserver_job import pserver_job

__all__ = ["pserver_job"]

# Neither the tests nor the processes that they start have settings but those that a test gives.
for variable in list(os.environ):
    if variable.startswith(PREFIX):
        del os.environ[variable]

# How long an example takes is not what a test is about: the first one may compile a kernel, and the machine is shared.
settings.register_profile("fleet_sparse", deadline=None)
settings.load_profile("fleet_sparse")
