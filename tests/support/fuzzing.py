"""Random cases for tests in tests/fuzz: how many, their seed, and frames to begin with."""

from __future__ import annotations

import gc
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fleet_sparse.pserver.admin.service import resident_bytes
from fleet_sparse.wire.encode import encode
from fleet_sparse.wire.frame_format import BLOCK, HEADER, HEADER_BYTES, MAGIC, PROTOCOL_VERSION, Action, Buffer, Op
from fleet_sparse.wire.row_dtype import RowDtype

from .frames import ALL_FRAMES, resized, sealed
from .mutations import MUTATIONS

FLAT_BYTES = 64 << 20
"""Growth of a process that still counts as none: caches that are bounded, and the slack of allocators."""
EDGES = (0, 1, 2, 3, 4, 7, 8, 127, 255, 256, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1)


class Cases:
    """The random cases of a test.

    Args:
        num_cases: Number of cases.
        seed: The same seed gives the same cases.

    Attributes:
        num_cases: Number of cases.
    """

    def __init__(self, num_cases: int, seed: str) -> None:
        self.num_cases = num_cases
        self._seed = seed

    @property
    def rng(self) -> random.Random:
        """A new generator, seeded."""
        return random.Random(self._seed)

    def report(self, **counts: int) -> None:
        """Prints what became of the cases."""
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        print(f"fuzz: {self._seed}: {self.num_cases} cases: {told}")


@contextmanager
def flat_memory(pid: int | None = None) -> Iterator[None]:
    """Asserts that a process, by default this one, has no more memory at the end of the block."""
    gc.collect()
    before = memory_of(pid)
    yield
    gc.collect()
    grown = memory_of(pid) - before
    assert grown < FLAT_BYTES, f"grew by {grown >> 20} MB"


def memory_of(pid: int | None) -> int:
    """Resident bytes of a process; None for this one."""
    if pid is None:
        return resident_bytes()
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def edge(rng: random.Random, bits: int) -> int:
    """A number that fits into so many bits, often one at the edge of something."""
    return (rng.choice(EDGES) if rng.random() < 0.7 else rng.getrandbits(bits)) & (2**bits - 1)


SENT = [[bytes(part) for part in encode(make())] for make in ALL_FRAMES]


def fuzzed_parts(rng: random.Random) -> list[bytes]:
    """Parts of a frame: random, structured or mutated, with the right checksum or another one."""
    draw = rng.random()
    if draw < 0.1:
        return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(4))]
    parts = structured_parts(rng) if draw < 0.4 else mutated(rng, rng.choice(SENT))
    if not parts or len(parts[0]) < HEADER_BYTES:
        return parts
    return rng.choice((list, sealed, resized, resized))(parts)


def mutated(rng: random.Random, parts: Sequence[bytes]) -> list[bytes]:
    """The parts after one or a few mutations."""
    changed = list(parts)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if changed and len(changed[0]) >= HEADER_BYTES:
            changed = rng.choice(MUTATIONS)(rng, changed)
    return changed


def structured_parts(rng: random.Random) -> list[bytes]:
    """Parts with a header and blocks of numbers that are likely at the edge of what is valid."""
    num_blocks = rng.choice((0, 1, 1, 2, 3))
    head = bytearray(
        HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            HEADER_BYTES,
            rng.choice(list(Op)) if rng.random() < 0.95 else edge(rng, 16),
            rng.choice((0, 0, 0, 1, 2, 3)),
            0,
            1,
            edge(rng, 64),
            edge(rng, 64),
            edge(rng, 32),
            edge(rng, 32),
            rng.randbytes(16),
            edge(rng, 32),
            num_blocks if rng.random() < 0.95 else edge(rng, 32),
            edge(rng, 64),
            edge(rng, 64),
            edge(rng, 64),
            edge(rng, 64),
            0,
            0,
            0,
            0,
            0,
        )
    )
    parts: list[bytes] = [b""]
    for _ in range(num_blocks):
        count, dim = rng.choice((0, 1, 2, 5, 1000)), rng.choice((1, 1, 2, 3, 16, 65536))
        dtype = rng.choice(list(RowDtype))
        mask = rng.choice((0, 1, 2, 3, 3, 3, edge(rng, 16)))
        if mask & 1:
            parts.append(rng.randbytes(8 * count) if rng.random() < 0.95 else rng.randbytes(edge(rng, 12)))
        if mask & 2:
            num_bytes = count * dim * dtype.in_frames.itemsize if rng.random() < 0.95 else edge(rng, 12)
            parts.append(bytes(min(num_bytes, 1 << 16)))
        head += BLOCK.pack(
            edge(rng, 32),
            rng.choice(list(Action)) if rng.random() < 0.95 else edge(rng, 8),
            dtype if rng.random() < 0.95 else edge(rng, 8),
            mask,
            edge(rng, 64),
            count if rng.random() < 0.95 else edge(rng, 64),
            dim if rng.random() < 0.95 else edge(rng, 32),
            0,
            *struct.unpack("<d", rng.randbytes(8)),
            edge(rng, 64),
            rng.choice((1.0, 0.5, float("nan"), float("inf"))),
            rng.choice((0, 0, 0, edge(rng, 64))),
        )
    if rng.random() < 0.1:
        head += rng.randbytes(rng.choice((8, 16, 24)))
    return [bytes(head), *parts[1:]]


def fuzzed_stream(rng: random.Random) -> tuple[bytes, list[list[bytes]]]:
    """The bytes of some messages, mutated or not, and their frames."""
    sent = [rng.choice(SENT) for _ in range(rng.randrange(1, 4))]
    data = b"".join(map(message, sent))
    kind = rng.randrange(5)
    if kind == 0:
        return data, sent
    if kind == 1:
        return rng.randbytes(rng.randrange(300)), []
    if kind == 2:
        num_parts = rng.choice((0, 1, 2, 3, 4096, 2**32 - 1))
        num_bytes = rng.choice((0, 8, 16, 8 * num_parts, 8 * num_parts + 8, 2**20, 2**63, 2**64 - 1))
        return struct.pack("<4sIQ", b"FSS1", num_parts, num_bytes) + rng.randbytes(rng.randrange(100)), []
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed)) if kind == 3 else rng.randrange(min(len(changed), 48))
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed[: rng.choice((len(changed), len(changed), rng.randrange(len(changed))))]), []


def message(parts: Sequence[Buffer]) -> bytes:
    """A message of docs/protocol.md."""
    body = b"".join(bytes(part) + bytes(-len(part) % 8) for part in parts)
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return struct.pack("<4sIQ", b"FSS1", len(parts), len(lengths) + len(body)) + lengths + body


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes after one or a few flips, cuts, repetitions or insertions."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, end = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at:end]
        elif kind == 2:
            changed[at:at] = changed[at:end]
        else:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
    return bytes(changed)
