"""`python -m fleet_sparse.pserver`: one pserver process, its supervisor, or the process that waits to be the next."""

from __future__ import annotations

import os
import sys
import traceback

from fleet_sparse.lifeline import TRY_AGAIN
from fleet_sparse.supervise import STANDBY

from .supervised import SUPERVISED, supervise


def main() -> None:
    """Runs a pserver, at once or when another one has died; or becomes its supervisor."""
    if SUPERVISED in sys.argv:
        sys.exit(supervise([each for each in sys.argv[1:] if each != SUPERVISED]))
    # gRPC logs wrong server names of TLS handshakes: bytes of strangers, as they are, without a bound.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if STANDBY in sys.argv:
        from .standby import stand_by

        try:
            sys.argv[1:] = stand_by()
        except Exception:
            traceback.print_exc()
            sys.exit(TRY_AGAIN)  # it may have become the pserver
    from .command_line import main as run_pserver  # not in a supervisor, which stays small

    run_pserver()


if __name__ == "__main__":
    main()
