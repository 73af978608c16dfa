"""Source: what a data set of the user reads, as this worker sees it now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fleet_sparse.errors import PlanError

from .lines import Lines
from .parser import LineParser
from .slots import Slot, read_slots
from .text import Pipe, Processes, text_of

_FEEDS = ("MultiSlotDataFeed", "MultiSlotInMemoryDataFeed")
_REMOTE = ("hdfs:", "afs:", "viewfs:")


class Source(NamedTuple):
    """Files, and how they become lines.

    Attributes:
        paths: The files, in order.
        slots: Slots of a line.
        num_names: Number of words at the beginning of each line that are left out.
        pipe: How a file becomes text.
        batch_size: Lines of a batch.
        num_threads: Number of threads that read.
    """

    paths: tuple[str, ...]
    slots: tuple[Slot, ...]
    num_names: int
    pipe: Pipe
    batch_size: int
    num_threads: int

    def lines_of(self, paths: Sequence[str], processes: Processes) -> Iterator[Lines]:
        """Yields the lines of some files, in order.

        Raises:
            DatasetError: A file or its `pipe_command` is wrong. The lines before a malformed one were yielded.
            InterruptedError: `processes.end` was called.
        """
        command = self.pipe.command.strip()
        parser = LineParser(self.slots, self.num_names, "" if command == "cat" else f" of {command!r}")
        for path in paths:
            number = 1
            for text in text_of(path, self.pipe, processes):
                for lines in parser.parse(text, path, number):
                    number += lines.num_lines
                    yield lines

    def shares(self) -> list[tuple[str, ...]]:
        """The files of each thread: every n-th one."""
        count = max(1, min(self.num_threads, len(self.paths)))
        return [self.paths[number::count] for number in range(count)]


def read_source(dataset: Any, timeout_s: float) -> Source:
    """Reads the settings of a data set.

    Raises:
        PlanError: It is of another kind, or a setting is not supported.
    """
    desc = dataset.proto_desc
    if desc.name not in _FEEDS:
        raise PlanError(
            f"{type(dataset).__name__}: is not supported. Use paddle.distributed.InMemoryDataset or QueueDataset"
        )
    for field, says in (
        ("merge_by_lineid", "merge_size"),
        ("fea_eval", "fea_eval"),
        ("parse_logkey", "parse_logkey"),
        ("enable_pv_merge", "enable_pv_merge"),
    ):
        if getattr(dataset, field, False):
            raise PlanError(f"{type(dataset).__name__}: {says} is set and is not supported. Leave it out")
    if desc.multi_slot_desc.uid_slot:
        raise PlanError(f"{type(dataset).__name__}: uid_slot is set and is not supported. Leave it out")
    if desc.batch_size < 1:
        raise PlanError(f"{type(dataset).__name__}: batch_size is {desc.batch_size}, should be 1 or more")
    for path in dataset.filelist:
        if path.startswith(_REMOTE):
            raise PlanError(
                f"{type(dataset).__name__}: file {path!r} is on a remote file system, should be a local path. Mount "
                "the file system, or set download_cmd to a command that writes the file whose path follows it"
            )
    return Source(
        tuple(map(str, dataset.filelist)),
        read_slots(desc),
        int(getattr(dataset, "parse_ins_id", False)) + int(getattr(dataset, "parse_content", False)),
        Pipe(desc.pipe_command or "cat", dataset.dataset.get_download_cmd() or "cat", timeout_s),
        desc.batch_size,
        dataset.thread_num,
    )
