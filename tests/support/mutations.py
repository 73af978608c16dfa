"""Mutations of the parts of a frame, and of any bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

from fleet_sparse.wire.frame_format import HEADER_BYTES

Mutation = Callable[[random.Random, list[bytes]], list[bytes]]


def flip(rng: random.Random, data: bytes, begin: int, end: int) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        changed[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_in_header(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    return [flip(rng, parts[0], 0, HEADER_BYTES), *parts[1:]]


def flip_anywhere(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.choice([index for index, part in enumerate(parts) if part])
    return [*parts[:index], flip(rng, parts[index], 0, len(parts[index])), *parts[index + 1 :]]


def truncate(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.choice([index for index, part in enumerate(parts) if part])
    return [*parts[:index], parts[index][: rng.randrange(len(parts[index]))], *parts[index + 1 :]]


def extend(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.randrange(len(parts))
    more = rng.choice((bytes(rng.choice((1, 8, 64))), rng.randbytes(8)))
    return [*parts[:index], parts[index] + more, *parts[index + 1 :]]


def move_bytes_between_parts(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    if len(parts) == 1:
        return extend(rng, parts)
    index = rng.randrange(len(parts) - 1)
    both, cut = parts[index] + parts[index + 1], rng.randrange(len(parts[index]) + 1)
    return [*parts[:index], both[:cut], both[cut:], *parts[index + 2 :]]


def drop(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.randrange(len(parts))
    return [*parts[:index], *parts[index + 1 :]]


def repeat(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    index = rng.randrange(len(parts))
    return [*parts[:index], parts[index], *parts[index:]]


def reorder(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    return rng.sample(parts, len(parts))


def replace_a_field(rng: random.Random, parts: list[bytes]) -> list[bytes]:
    head = bytearray(parts[0])
    size = rng.choice((1, 2, 4, 8))
    offset = rng.randrange(0, len(head), size)
    value = rng.choice((0, 1, 2, 3, 255, 2 ** (8 * size) - 1, rng.getrandbits(8 * size)))
    head[offset : offset + size] = (value & (2 ** (8 * size) - 1)).to_bytes(size, "little")
    return [bytes(head), *parts[1:]]


MUTATIONS: list[Mutation] = [
    flip_in_header,
    flip_anywhere,
    truncate,
    extend,
    move_bytes_between_parts,
    drop,
    repeat,
    reorder,
    replace_a_field,
]
