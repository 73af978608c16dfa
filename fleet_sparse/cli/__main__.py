"""`python -m fleet_sparse.cli`: the command `fleet-sparse`, where no script of that name is installed."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main()
