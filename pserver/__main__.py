"""`python -m fleet_sparse.pserver`: one pserver process, or its supervisor."""

from __future__ import annotations

import os
import sys

from .supervised import SUPERVISED, supervise


def main() -> None:
    """Runs a pserver, or becomes its supervisor."""
    if SUPERVISED in sys.argv:
        sys.exit(supervise([each for each in sys.argv[1:] if each != SUPERVISED]))
    # gRPC logs wrong server names of TLS handshakes: bytes of strangers, as they are, without a bound.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from .command_line import main as run_pserver  # not in a supervisor, which stays small

    run_pserver()


if __name__ == "__main__":
    main()
