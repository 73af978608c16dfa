"""KeptPushes: acked pushes to one shard that the machine of its pserver may still lose."""

from __future__ import annotations

from collections.abc import Iterator

from fleet_sparse.wire.frame_format import BLOCK, BLOCK_BYTES, Action, Buffer, Op

from .request import Request


class KeptPushes:
    """Pushes in the order of their seqs, in memory of their own.

    Args:
        max_bytes: Bound of `num_bytes`.

    Attributes:
        by_seq: The pushes.
        num_bytes: Bytes of their columns.
        max_bytes: Bound of `num_bytes`.
        durable_seq: Seq of the newest push that survives the machine, as far as replies say.
    """

    def __init__(self, max_bytes: int) -> None:
        self.by_seq: dict[int, Request] = {}
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self.durable_seq = 0

    def has_capacity(self, num_bytes: int) -> bool:
        """Returns whether this many bytes more can be kept. Nothing but one call's pushes may be larger."""
        return not self.by_seq or self.num_bytes + num_bytes <= self.max_bytes

    def keep(self, request: Request) -> None:
        """Keeps a push that was just acked, unless it is durable. Its caller may use its arrays again afterwards."""
        if request.push_seq > self.durable_seq:
            kept = request if request.is_replay else _replay_of(request)
            self.by_seq[kept.push_seq] = kept
            self.num_bytes += kept.num_bytes

    def drop_durable(self, seq: int) -> None:
        """Drops the pushes up to one that is durable. An older one changes nothing."""
        if seq <= self.durable_seq:
            return
        self.durable_seq = seq
        while self.by_seq:
            oldest = next(iter(self.by_seq))
            if oldest > seq:
                break
            self.num_bytes -= self.by_seq.pop(oldest).num_bytes

    def take_after(self, seq: int) -> list[Request]:
        """Returns the pushes behind one, which are not kept any more."""
        taken = [request for request in self.by_seq.values() if request.push_seq > seq]
        for request in taken:
            self.num_bytes -= self.by_seq.pop(request.push_seq).num_bytes
        return taken

    def clear(self) -> None:
        """Drops all pushes."""
        self.by_seq.clear()
        self.num_bytes = 0


def restore_pushed(request: Request, kept: Request) -> None:
    """Gives a push, whose caller may have used its arrays again since the ack, what its kept copy pushes."""
    columns = iter(kept.columns)
    for _, its_columns in _pushed_blocks(request):
        for index in range(its_columns.start, its_columns.stop):
            request.columns[index] = next(columns)


def _replay_of(request: Request) -> Request:
    """Returns a request that pushes the same without pulling anything, with columns of its own."""
    request.encode()
    table = bytearray()
    columns: list[Buffer] = []
    for number, its_columns in _pushed_blocks(request):
        table += request.table[BLOCK_BYTES * number : BLOCK_BYTES * (number + 1)]
        columns += map(bytes, request.columns[its_columns])
    op = Op.PUSH if request.op is Op.PUSH_PULL else request.op
    replay = Request(op, request.step, request.shard, request.part, request.num_parts, table=table, columns=columns)
    replay.num_bytes = sum(map(len, columns)) if columns else 0
    replay.order, replay.push_seq, replay.is_replay = request.order, request.push_seq, True
    return replay


def _pushed_blocks(request: Request) -> Iterator[tuple[int, slice]]:
    """Yields number and columns of each block that pulls nothing."""
    begin = 0
    for number, (_, action, _, mask, *_) in enumerate(BLOCK.iter_unpack(request.table)):
        end = begin + mask.bit_count()  # a column for each bit
        if action != Action.PULL:
            yield number, slice(begin, end)
        begin = end
