"""One pserver process: how its parts are assembled, started and stopped."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

import xxhash
import zmq

from fleet_sparse.control_socket import has_socket
from fleet_sparse.core.placement import Placement, version_of
from fleet_sparse.credentials import Credentials
from fleet_sparse.errors import (
    FleetSparseError,
    LeaseLost,
    LogCorrupt,
    LogFailed,
    SettingError,
    SnapshotCorrupt,
)
from fleet_sparse.lifeline import Lifeline
from fleet_sparse.net_addresses import Address, ip_address_of, is_local
from fleet_sparse.settings import LOGGED, Settings
from fleet_sparse.snapshot.directory import MANIFEST
from fleet_sparse.snapshot.store import SnapshotStore, is_snapshot, served_chain
from fleet_sparse.warm_up import warm_up, without_linear_algebra

from .admin.grpc_server import ControlPlane
from .admin.log_recovery import close_log, log_directory, start_log, write_checkpoint
from .admin.root import resolve_under
from .admin.service import ControlService, Supervised
from .admin.snapshot_loader import Loaded, load
from .endpoints import DataEndpoints, Endpoints, check_free, choose
from .engine.shard import Shard
from .lease.choice import open_coordinator
from .lease.directory import LEASES
from .lease.lease import Lease, take_lease
from .log.log_directory import newest_readable_header
from .net.data_plane import DataPlane
from .net.streams import Streams
from .read_only import content as read_only_content
from .read_only.follower import Follower
from .read_only.service import ReadOnlyService
from .read_only.shard import ReadOnlyShard
from .tables.row_limit import RowLimits

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")

WARN_EVERY_S = 60.0
RETRY_S = 0.5
"""Time between two attempts of a pserver that is started again to get what the system refuses."""
# libzmq before 4.3.2: CVE-2019-13132, CVE-2019-6250.
OLDEST_LIBZMQ = (4, 3, 2)


@dataclass(frozen=True)
class Options:
    """Command line of a pserver.

    Attributes:
        shard: Index of its shard, from 0.
        num_shards: Number of pservers of the job.
        control: Address of its control plane.
        servers: Addresses of all pservers of the job.
        load_dirname: Snapshot to start from, or None.
        load_tables: Names of the only tables to load; empty for all tables and dense arrays.
        cluster_id: u64, the same for all pservers of a job; None derives it from `servers`.
        endpoint_file: File that gets the bound address of the control plane once the pserver is ready, or None.
        is_read_only: True to serve the snapshots in `load_dirname` and train nothing.
        lifeline: Connection to the supervisor; None without one.
        generation: Generation of this start, below 2^32; None for the seconds of the wall clock.
        is_restart: True if workers had registered with the pserver that the supervisor started before.
        recover: Newest snapshot of the job, which takes the place of `load_dirname` and `load_tables`; None if the job
            has none yet.
        log_job_id: Identity of the job in the log if the settings have none.
        written: Snapshot of which the former pserver had written its file; newer than `recover` if it is complete.
        written_by: Id of the save that makes it so.
    """

    shard: int
    num_shards: int
    control: Address
    servers: tuple[Address, ...]
    load_dirname: str | None = None
    load_tables: tuple[str, ...] = ()
    cluster_id: int | None = None
    endpoint_file: Path | None = None
    is_read_only: bool = False
    lifeline: Lifeline | None = None
    generation: int | None = None
    is_restart: bool = False
    recover: str | None = None
    log_job_id: str = ""
    written: str | None = None
    written_by: str = ""

    def note_progress(self) -> None:
        """Tells the supervisor, if there is one, that the start of this pserver goes on."""
        if self.lifeline is not None:
            self.lifeline.note_progress()


def serve(options: Options, settings: Settings) -> None:
    """Runs a pserver until a `Stop` call, SIGTERM or SIGINT. Call it in the main thread.

    One that is started again in its job waits for an address, a coordinator or files that it does not get, for
    `failover_s`; after that its workers have given up.

    Raises:
        SettingError: An option contradicts another one, or an address cannot or may not be bound.
        SnapshotError: The snapshot to start from cannot be read.
        LeaseLost, LogFailed: As `DataPlane.run`.
    """
    _allow_files()
    _handle_stops(_exit)  # until there are requests to finish
    if options.lifeline is not None:
        options.lifeline.end_with_supervisor(settings.stall_s)
    # A name may not be resolved, or a file system be away, for a while.
    chosen = _patiently(partial(_check, options, settings), options, settings)
    credentials = _patiently(partial(Credentials.of, settings, is_pserver=True), options, settings)
    is_socket = credentials.has_control_sockets and has_socket(chosen.control)
    # Before kernels are compiled and a snapshot is loaded.
    _patiently(partial(check_free, chosen.control, has_socket=is_socket), options, settings)
    _log.info(
        "shard %d of %d starts: pid %d, root %s",
        options.shard,
        options.num_shards,
        os.getpid(),
        settings.root,
    )
    with ExitStack() as stack:
        with nullcontext() if settings.rules else without_linear_algebra():  # rules of the user may have linear algebra
            warm_up(trains=False, on_progress=options.note_progress)
        _start(options, settings, chosen, credentials, stack).run()
        if options.lifeline is not None:
            options.lifeline.report_ending()
    _log.info("shard %d stopped", options.shard)


def _start(
    options: Options,
    settings: Settings,
    chosen: Endpoints,
    credentials: Credentials,
    stack: ExitStack,
) -> DataPlane:
    """Starts everything but the loop of the data plane, which is returned; `stack` stops it."""
    started_at = time.monotonic()
    shard: Shard | ReadOnlyShard
    loaded: Loaded | None = None
    lease: Lease | None = None
    if options.is_read_only:
        shard = make_read_only_shard(options, settings)
    else:
        options, lease, shard, loaded = _patiently(partial(take_shard, options, settings), options, settings)
    if lease is not None:
        stack.callback(lease.release)
    stack.callback(shard.close)
    if isinstance(shard, Shard) and shard.log is not None:
        stack.callback(close_log, shard.log)
    streams = _patiently(partial(_streams, chosen, settings, credentials), options, settings)
    data_plane = DataPlane(
        shard,
        max_frame_bytes=settings.max_frame_bytes,
        streams=streams,
        zmq_host=ip_address_of(chosen.data_host) if streams is None else None,
        straight_path=settings.straight_path,
        lease=lease,
    )
    stack.callback(data_plane.close)
    endpoints = DataEndpoints(
        str(Address(chosen.advertised_host, data_plane.port)) if streams is None else "",
        "" if streams is None else streams.endpoint,
    )
    service: ControlService | ReadOnlyService
    if isinstance(shard, ReadOnlyShard):
        service = _follow(shard, data_plane, endpoints, options, settings, stack)
    else:
        service = ControlService(
            shard,
            post=data_plane.post,
            traffic=data_plane.traffic,
            data_endpoints=endpoints,
            settings=settings,
            stop=data_plane.stop,
            finish=partial(_finish, shard, data_plane, options.lifeline),
            loaded=loaded,
            supervised=None
            if options.lifeline is None
            else Supervised(
                options.is_restart,
                options.recover is not None,
                on_job=partial(options.lifeline.set_next, "--is-restart"),
                on_snapshot=partial(_note_snapshot, options.lifeline),
                on_written=partial(_note_written, options.lifeline),
            ),
        )
    listen = partial(ControlPlane, str(chosen.control), service, settings, credentials, lease)
    control_plane = _patiently(listen, options, settings)
    stack.callback(control_plane.close)
    if chosen.is_exposed and credentials.keys is None:
        stopped = threading.Event()
        threading.Thread(target=_warn, args=(chosen, stopped), name="warn", daemon=True).start()
        stack.callback(stopped.set)

    def stop(name: str) -> None:
        _log.info("%s: stopping", name)
        data_plane.stop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        # Not at once: a record written inside the write of another one raises, and the signal would be lost.
        data_plane.post(partial(stop, signal.Signals(number).name))

    signal.set_wakeup_fd(data_plane.wake_fd, warn_on_full_buffer=False)
    stack.callback(signal.set_wakeup_fd, -1)
    _handle_stops(on_signal)
    bound = Address(chosen.control.host, control_plane.port)
    if options.endpoint_file is not None:
        _write_endpoint(options.endpoint_file, bound)
    _log.info(
        "shard %d is ready after %.2f s: control plane %s, data plane %s",
        options.shard,
        time.monotonic() - started_at,
        bound,
        endpoints.stream or f"zmq:{endpoints.zmq}",
    )
    if lease is not None:
        lease.on_lost = data_plane.stop
        if lease.is_lost:
            data_plane.stop()
    if options.lifeline is not None:
        options.lifeline.set_next("--control", str(bound))
        options.lifeline.beat(data_plane.post, settings.stall_s)
    return data_plane


class Taken(NamedTuple):
    """A shard for which this process may answer."""

    options: Options
    """With the snapshot from which it continues."""
    lease: Lease | None
    shard: Shard
    loaded: Loaded | None


def take_shard(options: Options, settings: Settings) -> Taken:
    """Takes the lease of a shard, and makes the shard. Each attempt has a lease, and so a generation, of its own.

    Raises:
        FleetSparseError: As `lease_of`, `newest_of` and `make_shard`.
    """
    lease = lease_of(options, settings)
    try:
        options = dataclasses.replace(options, recover=newest_of(options, settings))
        if options.lifeline is not None and options.recover is not None:
            _note_snapshot(options.lifeline, options.recover)
        return Taken(options, lease, *make_shard(options, settings, lease))
    except BaseException:
        if lease is not None:
            lease.release()
        raise


def _note_written(lifeline: Lifeline, snapshot: str, save_id: str) -> None:
    """Makes the next process continue from a snapshot if this save has made it complete until then."""
    lifeline.set_next("--written-by", save_id)
    lifeline.set_next("--written", snapshot)


def _note_snapshot(lifeline: Lifeline, snapshot: str) -> None:
    """Makes the next process continue from a snapshot, whatever was written before."""
    lifeline.set_next("--written", snapshot)
    lifeline.set_next("--recover", snapshot)


def newest_of(options: Options, settings: Settings) -> str | None:
    """Returns the newest snapshot of the job, as of `Options.recover`.

    It may be one that became complete after the former pserver had written its file and before it heard of that.

    Raises:
        SnapshotError: The snapshot cannot be looked at.
    """
    if options.written in (None, options.recover):
        return options.recover
    assert options.written is not None, "checked above"
    source = resolve_under(settings.root, options.written)
    if MANIFEST not in source.names():  # the save was given up
        return options.recover
    try:
        manifest = SnapshotStore(source.parent()).manifest(source.name)
    except SnapshotCorrupt:  # whoever wrote the manifest crashed before it was complete
        return options.recover
    return options.written if manifest.save_id == options.written_by else options.recover


def _patiently(attempt: Callable[[], _Result], options: Options, settings: Settings) -> _Result:
    """Returns the result of an attempt, which a pserver that is started again repeats for `failover_s`.

    Raises:
        FleetSparseError: As the attempt, at once in other pservers, and for what does not pass.
    """
    until, is_said = time.monotonic() + settings.failover_s, False
    while True:
        try:
            return attempt()
        except (FleetSparseError, OSError) as error:
            passes = not isinstance(error, LeaseLost | LogFailed | LogCorrupt | SnapshotCorrupt)
            if not (options.is_restart and passes) or time.monotonic() >= until:
                raise
            if not is_said:
                _log.warning("tries again for %g s (FLEET_SPARSE_FAILOVER_S): %s", settings.failover_s, error)
                is_said = True
        options.note_progress()
        time.sleep(RETRY_S)


def _finish(shard: Shard, data_plane: DataPlane, lifeline: Lifeline | None) -> None:
    """Ends a pserver whose job has ended: nothing continues from its log, and no other one is started if it dies."""
    if lifeline is not None:
        lifeline.report_ending()
    if shard.log is not None:
        shard.log.is_finished = True
    data_plane.stop()


def _follow(
    shard: ReadOnlyShard,
    data_plane: DataPlane,
    endpoints: DataEndpoints,
    options: Options,
    settings: Settings,
    stack: ExitStack,
) -> ReadOnlyService:
    """Follows the series that a shard was loaded from, unless that is one snapshot; returns what answers the calls."""
    assert options.load_dirname is not None, "checked by _check"
    directory = resolve_under(settings.root, options.load_dirname)
    follower: Follower | None = None
    if not is_snapshot(directory):
        follower = Follower(shard, directory, data_plane.post, version_keep_s=settings.version_keep_s)
    service = ReadOnlyService(
        shard,
        follower=None if follower is None else follower.stats,
        traffic=data_plane.traffic,
        data_endpoints=endpoints,
        stop=data_plane.stop,
    )
    if follower is not None:
        follower.on_change = service.note_change
        stack.callback(follower.stop)
        follower.start()
    return service


def _streams(chosen: Endpoints, settings: Settings, credentials: Credentials) -> Streams | None:
    """Listens on a Unix socket if all pservers are on this host, else on TCP; None if the job chose ZeroMQ."""
    if settings.channel == "zmq":
        return None
    streams = partial(
        Streams,
        max_frame_bytes=settings.max_frame_bytes,
        max_receiving_bytes=settings.max_receiving_bytes,
        credentials=credentials,
    )
    if not chosen.is_exposed:
        return streams()
    return streams(host=ip_address_of(chosen.data_host), advertised_host=chosen.advertised_host)


def lease_of(options: Options, settings: Settings) -> Lease | None:
    """Takes the lease of the shard that the options name, once no other pserver holds it; None if it needs none.

    Raises:
        SettingError: The coordinator cannot be reached, or the system refuses the directory of the log; or as
            `open_coordinator` and `take_lease`.
    """
    has_log = settings.durability in LOGGED
    if not has_log and not settings.coordinator:
        return None
    job, directory, newest = settings.job_id or options.log_job_id, Path(), 0
    name = f"shard-{options.shard}-of-{options.num_shards}"
    try:
        if has_log:
            log = log_directory(dataclasses.replace(settings, job_id=job), options.shard, options.num_shards)
            directory, header = log.parent / LEASES, newest_readable_header(log)
            if header is not None:
                newest = header.generation
            elif options.generation is not None:  # so that workers do not ignore it as older than one whose log is gone
                newest = options.generation - 1
        coordinator = open_coordinator(settings.coordinator, directory, job, ttl_s=settings.lease_s)
        try:
            return take_lease(
                coordinator,
                name,
                settings.lease_s,
                job=job,
                after=newest,
                patience_s=settings.failover_s,
                on_wait=options.note_progress,
            )
        except BaseException:
            with suppress(OSError):
                coordinator.close()
            raise
    except OSError as error:
        if not settings.coordinator or error.filename is not None:
            raise _refused_log(settings, error) from error
        raise SettingError(
            f"FLEET_SPARSE_COORDINATOR: {settings.coordinator!r} cannot be reached: {error}. Start it, or correct the "
            "variable"
        ) from error


def _refused_log(settings: Settings, error: OSError) -> SettingError:
    return SettingError(
        f"FLEET_SPARSE_LOG: is {settings.log!r}, where the system refuses the log: {error}. Make room there, let the "
        "pserver write there, or set it to another directory"
    )


def make_shard(options: Options, settings: Settings, lease: Lease | None = None) -> tuple[Shard, Loaded | None]:
    """Makes the shard that the options name. It continues from its log; else it loads the snapshot, if one is named.

    Kernels should be warm: see `warm_up`.

    Raises:
        SnapshotError: The snapshot cannot be read.
        LogCorrupt, LogFull, LeaseLost, PlanError: As `start_log`.
        SettingError: More pservers should have rows than there are, or the system refuses the directory of the log.
    """
    if settings.row_shards > options.num_shards:
        raise SettingError(
            f"FLEET_SPARSE_ROW_SHARDS: is {settings.row_shards}, and there are {options.num_shards} pservers. Write at "
            "most their number, or leave it out"
        )
    shard = Shard(
        options.shard,
        options.num_shards,
        cluster_id=cluster_id_of(options.servers) if options.cluster_id is None else options.cluster_id,
        incarnation=incarnation_of(options.generation if lease is None else lease.generation),
        placement=Placement.even(options.num_shards, version_of(options.num_shards, settings.row_shards)),
        max_staged_bytes=settings.max_staged_bytes,
        max_pre_image_bytes=settings.max_pre_image_bytes,
        huge_pages=settings.huge_pages,
        row_limits=RowLimits(settings.max_rows, settings.max_bytes),
        only_registered=True,
        max_reply_bytes=settings.max_frame_bytes,
    )
    try:
        return shard, _fill(shard, options, settings, lease)
    except BaseException:
        if shard.log is not None:
            shard.log.writer.close()
        shard.close()
        raise


def _fill(shard: Shard, options: Options, settings: Settings, lease: Lease | None) -> Loaded | None:
    """Gives a new shard its log and its rows; returns what was loaded of a snapshot."""
    on_progress = options.note_progress if lease is None else partial(_go_on, options, lease)
    if settings.durability in LOGGED:
        of_log = settings if settings.job_id else dataclasses.replace(settings, job_id=options.log_job_id)
        generation = 0 if lease is None else lease.generation
        try:
            directory = log_directory(of_log, options.shard, options.num_shards)
            continues = start_log(shard, directory, of_log, generation=generation, on_progress=on_progress)
        except OSError as error:
            raise _refused_log(settings, error) from error
        if lease is not None and shard.log is not None:
            shard.log.writer.check_lease, shard.log.writer.on_lease_lost = lease.check, lease.lose
        if continues:
            return None
    dirname = options.load_dirname if options.recover is None else options.recover
    if dirname is None:
        return None
    started_at = time.monotonic()
    source = resolve_under(settings.root, dirname)
    if options.recover is not None and not source.names():
        # A save whose end the former pserver did not see has replaced the snapshot.
        source = source.parent()
    tables = options.load_tables if options.recover is None else ()
    log, shard.log = shard.log, None
    try:
        loaded = load(shard, source, tables, on_progress=on_progress)
    finally:
        shard.log = log
    if log is not None:
        write_checkpoint(shard, on_progress)
    _log.info(
        "loaded %d rows of snapshot %s in %s, number of shards: %d, in %.2f s",
        loaded.num_rows,
        loaded.manifest.name,
        source,
        loaded.manifest.num_shards,
        time.monotonic() - started_at,
    )
    return loaded


def _go_on(options: Options, lease: Lease) -> None:
    """Tells the supervisor that the start goes on, unless another pserver may have taken the place of this one."""
    lease.check()
    options.note_progress()


def make_read_only_shard(options: Options, settings: Settings) -> ReadOnlyShard:
    """Makes the read-only shard that the options name and loads the served snapshot into it.

    Raises:
        SnapshotError: The snapshot cannot be read.
    """
    assert options.load_dirname is not None, "checked by _check"
    started_at = time.monotonic()
    shard = ReadOnlyShard(
        options.shard,
        options.num_shards,
        cluster_id=cluster_id_of(options.servers) if options.cluster_id is None else options.cluster_id,
        incarnation=incarnation_of(options.generation),
        max_reply_bytes=settings.max_frame_bytes,
        huge_pages=settings.huge_pages,
    )
    directory = resolve_under(settings.root, options.load_dirname)
    num_rows = read_only_content.load(shard, served_chain(directory), on_progress=options.note_progress)
    _log.info(
        "loaded %d rows of snapshot %d (%016x) in %s, in %.2f s; read-only",
        num_rows,
        shard.newest.number,
        shard.newest.checksum,
        directory,
        time.monotonic() - started_at,
    )
    return shard


def incarnation_of(generation: int | None) -> int:
    """Returns the number of a start of a pserver: later starts of one pserver have larger ones.

    Args:
        generation: Generation of the start, below 2^32, that of the lease if there is one; None for the seconds of the
            wall clock.
    """
    return (int(time.time()) if generation is None else generation) << 32 | secrets.randbits(32)


def cluster_id_of(servers: Sequence[Address]) -> int:
    """Returns a number that is the same for all pservers of a job: a hash of the list of their addresses."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, servers)).encode())


def _check(options: Options, settings: Settings) -> Endpoints:
    if not 0 <= options.shard < options.num_shards:
        raise SettingError(f"shard {options.shard}: there are {options.num_shards}, the index should be below that")
    if len(options.servers) != options.num_shards:
        raise SettingError(
            f"servers: {len(options.servers)} addresses for {options.num_shards} shards; list the address of each"
        )
    if options.is_read_only and (options.load_dirname is None or options.load_tables):
        raise SettingError("--read-only: should have --load with a directory of snapshots, and no --load-table")
    if zmq.zmq_version_info() < OLDEST_LIBZMQ:
        raise SettingError(f"libzmq is {zmq.zmq_version()}, should be 4.3.2 or newer. Upgrade pyzmq")
    return choose(options.control, options.servers, settings, is_local=is_local)


def _allow_files() -> None:
    """Raises the limit of open files to what the system allows: each connection of a worker is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _handle_stops(handler: Callable[[int, FrameType | None], None]) -> None:
    """Makes a handler that of the signals to stop, without those that are ignored, as Ctrl-C is in the background."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)  # without a record: it may come inside the write of another one, where one raises


def _warn(chosen: Endpoints, stopped: threading.Event) -> None:
    while True:
        _log.warning(
            "FLEET_SPARSE_INSECURE is set: any client that reaches %s can read and change every table",
            chosen.control.host,
        )
        if stopped.wait(WARN_EVERY_S):
            return


def _write_endpoint(path: Path, address: Address) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(f"{address}\n")
    temporary.replace(path)
