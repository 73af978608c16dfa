"""PaddlePaddle 2.6's own parameter server: rows inserted, saved, and loaded. Runs in the venv of `baselines.PADDLE`.

    .venv-paddle-2.6/bin/python benchmarks/baselines/paddle_ps.py --rows 1000000

Servers and one trainer are processes on this machine; one JSON line tells what they took. A first job inserts the rows
and saves them with `fleet.save_persistables`; a second one starts its servers with `fleet.init_server(directory)`; a
third one's trainer calls `fleet.load_model`. After each load some rows are looked up and compared with those before.
Dense parameters (two layers, Adam) are saved beside the rows. `--shards 8` files a table is what was fastest here; 1000
is Paddle's default.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

BATCH = 4096
SLOTS = 26
NUM_LOOKED_UP = 1000
START_S, JOB_S = 900.0, 1800.0
RULES = {
    "naive": "SparseNaiveSGDRule",
    "adagrad": "SparseAdaGradSGDRule",
    "std_adagrad": "StdAdaGradSGDRule",
    "adam": "SparseAdamSGDRule",
    "shared_adam": "SparseSharedAdamSGDRule",
}


def parsed() -> argparse.Namespace:
    """Returns the options, the same for all processes of a job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="distinct ids to insert")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rule", choices=RULES, default="adagrad", help="of the sparse table, in Paddle's words")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8, help="files of the sparse table")
    parser.add_argument("--passes", type=int, default=1, help="pushes of the first id; each pass leaves more ids out")
    parser.add_argument("--threshold", type=int, default=0, help="pushes from which an id has more than one value")
    parser.add_argument("--save", type=Path, help="directory that is left with the checkpoint")
    parser.add_argument("--lookups", type=Path, help="file that is left with what lookups answered, as JSON")
    parser.add_argument("--task", choices=("insert", "check"), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--load", choices=("servers", "trainer"), help=argparse.SUPPRESS)
    parser.add_argument("--answers", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the three jobs and returns their times."""
    with tempfile.TemporaryDirectory(prefix="paddle-ps-") as directory:
        checkpoint = (options.save or Path(directory) / "checkpoint").resolve()
        answers = (options.lookups or Path(directory) / "answers.json").resolve()
        common = ["--checkpoint", str(checkpoint), "--answers", str(answers)]
        inserted = run_job(options, Path(directory) / "insert", ["--task", "insert", *common])
        by_servers = run_job(options, Path(directory) / "servers", ["--task", "check", "--load", "servers", *common])
        by_trainer = run_job(options, Path(directory) / "trainer", ["--task", "check", "--load", "trainer", *common])
    return {
        "rows": options.rows,
        "dim": options.dim,
        "rule": options.rule,
        "servers": options.servers,
        "shards": options.shards,
        "insert_s": inserted["insert_s"],
        "save_s": inserted["save_s"],
        "save_bytes": inserted["save_bytes"],
        "save_files": inserted["save_files"],
        "start_s": inserted["start_s"],
        "start_with_load_s": by_servers["start_s"],
        "load_model_s": by_trainer["load_s"],
        "largest_difference": max(by_servers["largest_difference"], by_trainer["largest_difference"]),
    }


def run_job(options: argparse.Namespace, directory: Path, arguments: list[str]) -> dict[str, Any]:
    """Runs servers and a trainer until it ends; returns what it printed, and the time until the servers listened."""
    directory.mkdir()
    ports = free_ports(options.servers + 1)
    environment = job_environment(ports)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *arguments]
    with ExitStack() as stack:

        def start(name: str, role: str, port: int) -> subprocess.Popen[bytes]:
            log = stack.enter_context((directory / name).open("wb"))
            variables = {**environment, "TRAINING_ROLE": role, "PADDLE_PORT": str(port)}
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=directory)
            stack.callback(end, process)
            return process

        begun = time.perf_counter()
        servers = [start(f"server{index}", "PSERVER", port) for index, port in enumerate(ports[1:])]
        for process, port in zip(servers, ports[1:], strict=True):
            wait_until_listening(process, port, begun + START_S, directory)
        start_s = time.perf_counter() - begun
        trainer = start("trainer", "TRAINER", ports[0])
        code = trainer.wait(JOB_S)
    output = (directory / "trainer").read_text(errors="replace")
    if code:
        raise SystemExit(f"the trainer ended with exit code {code}:\n{output[-2000:]}")
    return {**json.loads(output.splitlines()[-1]), "start_s": start_s}


def job_environment(ports: Sequence[int]) -> dict[str, str]:
    """Returns the variables of all processes of a job: a trainer at the first port, servers at the others."""
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "FLAGS_use_mkldnn": "0",
        "POD_IP": "127.0.0.1",
        "PADDLE_TRAINERS_NUM": "1",
        "PADDLE_TRAINER_ID": "0",
        "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints[1:]),
        "PADDLE_TRAINER_ENDPOINTS": endpoints[0],
    }


def free_ports(count: int) -> list[int]:
    """Returns ports on which nothing listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_until_listening(process: subprocess.Popen[bytes], port: int, until: float, logs: Path) -> None:
    """Returns once something listens on the port. A server loads before it does."""
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process.poll() is not None or time.perf_counter() > until:
            raise SystemExit(f"a server did not start:\n{(logs / 'server0').read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process if it still runs."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def build(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Builds the program, minimized by fleet; returns paddle, the rows that it looks up, and its loss."""
    import paddle
    from paddle.distributed import fleet

    paddle.enable_static()
    fleet.init(is_collective=False)
    ids = paddle.static.data("ids", [None, 1], "int64", lod_level=1)
    attr = paddle.ParamAttr(name="emb", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    rows = paddle.static.nn.sparse_embedding(input=ids, size=[2, options.dim], param_attr=attr)
    hidden = paddle.static.nn.fc(rows, 3, activation="tanh", name="hidden")
    logit = paddle.static.nn.fc(hidden, 1, name="logit")
    label = paddle.static.data("label", [None, 1], "float32")
    loss = paddle.mean(paddle.nn.functional.binary_cross_entropy_with_logits(logit, label))
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    configure(strategy.sparse_table_configs.add(), options)
    fleet.distributed_optimizer(paddle.optimizer.Adam(0.01, lazy_mode=True), strategy).minimize(loss)
    return paddle, rows, loss


def configure(table: Any, options: argparse.Namespace) -> None:
    """Sets the rule of the sparse table, the same for its first value and for the others."""
    table.table_name, table.table_class, table.shard_num = "emb", "MemorySparseTable", options.shards
    accessor = table.accessor
    accessor.accessor_class = "SparseAccessor"
    accessor.fea_dim, accessor.embedx_dim = options.dim + 2, options.dim - 1
    accessor.embedx_threshold = options.threshold
    accessor.ctr_accessor_param.nonclk_coeff = 1.0  # a push counts as one
    for rule in (accessor.embed_sgd_param, accessor.embedx_sgd_param):
        rule.name = RULES[options.rule]
        kind = "naive" if options.rule == "naive" else "adam" if "adam" in options.rule else "adagrad"
        own = getattr(rule, kind)
        own.learning_rate, own.initial_range = 0.05, 0.01
        own.weight_bounds.extend([-10.0, 10.0])
        if kind == "adagrad":
            own.initial_g2sum = 3.0
        if kind == "adam":
            own.beta1_decay_rate, own.beta2_decay_rate, own.ada_epsilon = 0.9, 0.999, 1e-8


def serve(options: argparse.Namespace) -> None:
    """Runs a server until it is killed."""
    build(options)
    from paddle.distributed import fleet

    fleet.init_server(*([str(options.checkpoint)] if options.load == "servers" else []))
    fleet.run_server()


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the trainer of a job and returns its times."""
    paddle, rows, loss = build(options)
    from paddle.distributed import fleet

    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    program = paddle.static.default_main_program()
    result = (insert if options.task == "insert" else check)(options, fleet, executor, program, rows, loss)
    fleet.stop_worker()
    return result


def insert(
    options: argparse.Namespace, fleet: Any, executor: Any, program: Any, rows: Any, loss: Any
) -> dict[str, Any]:
    """Inserts and saves rows, and writes a file with the replies to lookups."""
    import numpy as np

    ids = all_ids(options.rows)
    begun = time.perf_counter()
    for each in range(options.passes):
        some = ids[: -(-len(ids) // (each + 1))]
        for begin in range(0, len(some), BATCH * SLOTS):
            batch = some[begin : begin + BATCH * SLOTS].reshape(-1, 1)
            labels = (batch % 3 == 0).astype(np.float32)
            executor.run(program, feed={"ids": batch, "label": labels}, fetch_list=[])
        flush(fleet)
    insert_s = time.perf_counter() - begun
    begun = time.perf_counter()
    fleet.save_persistables(executor, str(options.checkpoint), program, mode=0)
    save_s = time.perf_counter() - begun
    answers = look_up(executor, program, ids, rows)
    options.answers.write_text(json.dumps(answers) + "\n")
    files = [path for path in options.checkpoint.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in files)
    return {"insert_s": insert_s, "save_s": save_s, "save_bytes": num_bytes, "save_files": len(files)}


def check(options: argparse.Namespace, fleet: Any, executor: Any, program: Any, rows: Any, loss: Any) -> dict[str, Any]:
    """Loads if the servers have not, and compares lookups with the replies before the save."""
    import numpy as np

    begun = time.perf_counter()
    if options.load == "trainer":
        fleet.load_model(str(options.checkpoint), mode=0)
    load_s = time.perf_counter() - begun
    expected, found = json.loads(options.answers.read_text()), look_up(executor, program, all_ids(options.rows), rows)
    difference = np.abs(np.array(expected["rows"]) - np.array(found["rows"])).max()
    if not np.array(expected["rows"]).any() or difference > 1e-4:
        raise SystemExit(f"lookups after the load differ by {difference} from those before the save")
    return {"load_s": load_s, "largest_difference": float(difference)}


def all_ids(count: int) -> Any:
    """Returns distinct ids: small ones, some negative, some beyond 2^53."""
    import numpy as np

    ids = np.arange(1, count + 1, dtype=np.int64)
    ids[3::8] *= -1
    ids[5::8] += 1 << 62
    return ids


def look_up(executor: Any, program: Any, ids: Any, rows: Any) -> dict[str, Any]:
    """Returns the servers' rows of the first ids; changes nothing."""
    import numpy as np

    ids = ids[:NUM_LOOKED_UP]
    feed = {"ids": ids.reshape(-1, 1), "label": np.zeros((len(ids), 1), np.float32)}
    (found,) = executor.run(program, feed=feed, fetch_list=[rows], use_prune=True)
    return {"ids": ids.tolist(), "rows": np.asarray(found).astype(np.float64).round(9).tolist()}


def flush(fleet: Any) -> None:
    """Returns once the servers have applied all pushes. There is no public call for it."""
    fleet.fleet._runtime_handle._worker.client_flush()


def main() -> None:
    """Runs the part of a job that the environment names."""
    options = parsed()
    role = os.environ.get("TRAINING_ROLE") if options.task else None
    if role == "PSERVER":
        serve(options)
    else:
        print(json.dumps(train(options) if role else launch(options)), flush=True)


if __name__ == "__main__":
    main()
