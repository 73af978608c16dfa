"""DepartedClients: clients that are workers no more, as long as a shard remembers them."""

from __future__ import annotations

from collections.abc import Iterable


class DepartedClients:
    """Clients that are workers no more. Each is kept until two saves were committed after it departed.

    Two, because the first of them may have been cut before.

    Args:
        recent: Clients that departed after the newest committed save.
        earlier: Clients that departed between it and the one before.

    Attributes:
        recent: Those that departed after the newest committed save.
        earlier: Those that departed before it.
    """

    def __init__(self, recent: Iterable[bytes] = (), earlier: Iterable[bytes] = ()) -> None:
        self.recent = set(recent)
        self.earlier = set(earlier)

    def __contains__(self, client_id: bytes) -> bool:
        return client_id in self.recent or client_id in self.earlier

    def add(self, client_ids: Iterable[bytes]) -> None:
        """These clients depart now, unless they have departed before."""
        self.recent.update(client_id for client_id in client_ids if client_id not in self.earlier)

    def discard(self, client_id: bytes) -> None:
        """A client is a worker again."""
        self.recent.discard(client_id)
        self.earlier.discard(client_id)

    def pass_save(self) -> set[bytes]:
        """A save is committed: returns the clients that are kept no more."""
        forgotten, self.earlier, self.recent = self.earlier, self.recent, set()
        return forgotten
