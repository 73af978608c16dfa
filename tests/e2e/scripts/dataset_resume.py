"""Sync training over a data set that saves, and resumes from its snapshot. Prints every loss, bit by bit.

DATASET is `InMemoryDataset`, which is shuffled globally once and locally in each of the three epochs, or
`QueueDataset`. FILES are the files of all workers, separated by commas. SAVE_AT is the step after which worker 0 saves;
one step later each worker waits to be killed.
"""

import os
import time

import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from program import AHEAD, linear, minimize, note_next_push, start, table, wait_until_ahead

import fleet_sparse

ids = paddle.static.data("ids", [None, 3], "int64")
label = paddle.static.data("label", [None, 1], "float32")
logit = linear(paddle.sum(table(ids, "items", None), axis=1), "w", 0.3)
loss = paddle.nn.functional.binary_cross_entropy_with_logits(logit, label)
minimize(loss, paddle.optimizer.Adagrad(0.1))
start()
steps, save_at = [], int(os.environ.get("SAVE_AT", "0"))


class Saving(paddle.static.Executor):
    def run(self, *args, **kwargs):
        results = super().run(*args, **kwargs)
        print("loss", float(np.array(results[0])).hex(), flush=True)
        steps.append(results)
        if len(steps) == save_at and fleet.worker_index() == 1:
            note_next_push()
        if len(steps) == save_at and fleet.worker_index() == 0:
            wait_until_ahead()
            fleet_sparse.save("model")
            print("saved", flush=True)
        if save_at and len(steps) == save_at + 1:
            time.sleep(1000)
        return results


exe = Saving()
dataset = getattr(paddle.distributed, os.environ["DATASET"])()
dataset.init(batch_size=4, thread_num=2, use_var=[ids, label], pipe_command="cat")
dataset.set_filelist(fleet.util.get_file_shard(os.environ["FILES"].split(",")))
is_in_memory = os.environ["DATASET"] == "InMemoryDataset"
if is_in_memory:
    dataset.load_into_memory()
    dataset.global_shuffle(fleet)
examples = fleet_sparse.resumable(dataset)
print("resumes at step", fleet_sparse.resume_step(), "epoch", examples.epoch, flush=True)
for _ in range(examples.epoch, 3):
    if is_in_memory:
        dataset.local_shuffle()
    exe.train_from_dataset(None, examples, fetch_list=[loss], fetch_info=["loss"])
    if save_at and fleet.worker_index() == 1:
        AHEAD.touch()  # it has fewer batches, and waits at the barrier
    fleet.barrier_worker()
fleet.stop_worker()
