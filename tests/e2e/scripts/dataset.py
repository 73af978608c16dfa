"""Sync training over a data set. Prints every loss, bit by bit.

DATASET is `InMemoryDataset` or `QueueDataset`, or `loop` for a loop of exe.run over the same batches. FILES are the
files of all workers, separated by commas, of which each worker reads its share. With SHUFFLE an InMemoryDataset is
shuffled globally; its sizes are printed and, with each loss, the labels and ids of the batch.
"""

import os
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import linear, minimize, start, table

BATCH = 8
ids = paddle.static.data("ids", [None, 3], "int64")
tags = paddle.static.data("tags", [None, None], "int64")
label = paddle.static.data("label", [None, 1], "float32")
rows = [paddle.sum(table(ids, "items", None), axis=1), paddle.sum(table(tags, "tags", None), axis=1)]
loss = paddle.nn.functional.binary_cross_entropy_with_logits(linear(paddle.concat(rows, axis=1), "w", 0.3), label)
minimize(loss, paddle.optimizer.Adagrad(0.1))
exe = start()
files = fleet.util.get_file_shard(os.environ["FILES"].split(","))


class Printing(paddle.static.Executor):
    def run(self, *args, **kwargs):
        results = super().run(*args, **kwargs)
        print("loss", float(np.array(results[0])).hex(), flush=True)
        if os.environ.get("SHUFFLE"):
            for line in np.column_stack([kwargs["feed"]["label"], kwargs["feed"]["ids"]]).astype(int).tolist():
                print("line", *line, flush=True)
        return results


def batches():
    lines = [line.split() for path in files for line in Path(path).read_text().splitlines()]
    for begin in range(0, len(lines), BATCH):
        batch = lines[begin : begin + BATCH]
        width = max(int(line[4]) for line in batch)
        yield {
            "ids": np.array([line[1:4] for line in batch], np.int64),
            "tags": np.array([line[5:-2] + ["0"] * (width - int(line[4])) for line in batch], np.int64),
            "label": np.array([line[-1:] for line in batch], np.float32),
        }


kind = os.environ["DATASET"]
if kind != "loop":
    dataset = getattr(paddle.distributed, kind)()
    dataset.init(batch_size=BATCH, thread_num=1, use_var=[ids, tags, label], pipe_command="cat -")
    dataset.set_filelist(files)
    if kind == "InMemoryDataset":
        dataset.load_into_memory()
        if os.environ.get("SHUFFLE"):
            before = dataset.get_memory_data_size()
            dataset.global_shuffle(fleet)
            sizes = before, dataset.get_memory_data_size(), dataset.get_shuffle_data_size(fleet)
            print("sizes", *sizes, flush=True)
exe = Printing()
for _ in range(2):
    if kind == "loop":
        for feed in batches():
            exe.run(feed=feed, fetch_list=[loss])
    else:
        exe.train_from_dataset(None, dataset, fetch_list=[loss], fetch_info=["loss"])
    fleet.barrier_worker()
fleet.stop_worker()
