"""`python -m fleet_sparse.cli` is the command `fleet-sparse`, also without its script installed."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main()
