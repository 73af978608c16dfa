from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fleet_sparse import supervise
from fleet_sparse.lifeline import ALIVE, STARTING, TRY_AGAIN, Lifeline
from fleet_sparse.local_pservers import child_environment
from fleet_sparse.supervise import RESTARTS_WITHIN_S, Generations, Standby, Supervision
from support.waits import wait_until

KILLED = -int(signal.SIGKILL)
NO_MEMORY = OSError(errno.ENOMEM, "Cannot allocate memory")
END_S = 30.0


def supervision_of(max_restarts: int = 3, stall_s: float = 30.0) -> Supervision:
    return Supervision(max_restarts, stall_s)


@pytest.mark.parametrize("status", [0, 1, 2])
def test_child_that_ended_by_itself_is_not_started_again(status: int) -> None:
    decision = supervision_of().end(status, 0.0)
    assert (decision.pause_s, decision.code) == (None, status)


@pytest.mark.parametrize("status", [0, 1, 3, TRY_AGAIN, 120, 255])
def test_a_script_with_any_exit_code_ended_by_itself(status: int) -> None:
    supervision = Supervision(3, 30.0, is_script=True)
    for _ in range(2):
        supervision.begin(0.0)
    assert supervision.end(status, 0.0)[:2] == (None, status)


@pytest.mark.parametrize("status", [1, 2])
def test_a_later_child_that_ended_in_silence_had_not_begun(status: int) -> None:
    """As one that could not be imported for want of memory."""
    supervision = supervision_of()
    supervision.begin(0.0)
    supervision.hear(ALIVE, 0.0)
    supervision.end(KILLED, 1.0)
    supervision.begin(1.0)
    assert supervision.end(status, 2.0).pause_s == 0.0


@pytest.mark.parametrize("status", [1, 2])
def test_a_later_child_that_said_something_ended_by_itself(status: int) -> None:
    supervision = supervision_of()
    for _ in range(2):
        supervision.begin(0.0)
    supervision.hear(STARTING, 0.0)
    assert supervision.end(status, 0.0)[:2] == (None, status)


@pytest.mark.parametrize("status", [KILLED, -int(signal.SIGSEGV), TRY_AGAIN, 3])
def test_child_that_died_is_started_again_at_once(status: int) -> None:
    supervision = supervision_of()
    assert supervision.end(status, 0.0).pause_s == 0.0


@pytest.mark.parametrize(
    ("lines", "is_restarted"),
    [
        (("restart after loss", "loss"), True),
        (("loss",), False),
        (("restart after loss",), False),
    ],
)
def test_child_that_lost_another_is_restarted_if_it_asked(lines: Sequence[str], is_restarted: bool) -> None:
    supervision = supervision_of()
    for line in lines:
        supervision.hear(line, 0.0)
    assert (supervision.end(1, 1.0).pause_s is not None) is is_restarted


def test_loss_counts_for_the_child_that_reported_it_only() -> None:
    supervision = supervision_of()
    for line in ("restart after loss", "loss"):
        supervision.hear(line, 0.0)
    assert supervision.end(1, 1.0).pause_s == 0.0
    supervision.begin(0.0)
    assert supervision.end(1, 2.0).pause_s is None


def test_later_children_need_not_ask_again() -> None:
    supervision = supervision_of()
    supervision.hear("restart after loss", 0.0)
    supervision.end(KILLED, 1.0)
    supervision.begin(0.0)
    supervision.hear("loss", 2.0)
    assert supervision.end(1, 3.0).pause_s is not None


def test_pauses_between_restarts_grow() -> None:
    supervision = supervision_of(max_restarts=10)
    pauses = [supervision.end(KILLED, float(now)).pause_s for now in range(10)]
    assert pauses == [0.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_child_that_was_ending_in_order_is_not_started_again() -> None:
    supervision = supervision_of()
    supervision.begin(0.0)
    for line in ("alive", "ending"):
        supervision.hear(line, 1.0)
    assert supervision.kills_at() == 601.0
    assert supervision.end(KILLED, 2.0)[:2] == (None, 128 - KILLED)


def test_a_child_that_lived_a_while_is_started_at_once() -> None:
    supervision, pauses = supervision_of(max_restarts=10), []
    for now, lives_s in ((0.0, 1.5), (10.0, 1.5), (20.0, 0.5), (30.0, 0.5), (40.0, 0.5), (50.0, 1.5), (60.0, 0.5)):
        supervision.begin(0.0)
        supervision.hear("alive", now)
        pauses.append(supervision.end(KILLED, now + lives_s).pause_s)
    assert pauses == [0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]


def test_supervisor_gives_up_after_too_many_restarts() -> None:
    supervision = supervision_of(max_restarts=3)
    decisions = [supervision.end(KILLED, float(now)) for now in range(4)]
    assert [each.pause_s is None for each in decisions] == [False, False, False, True]
    assert decisions[-1].code == 1


def test_a_first_start_that_is_refused_is_the_end() -> None:
    decision = supervision_of().refuse(NO_MEMORY, 0.0)
    assert (decision.pause_s, decision.code) == (None, 1)
    assert "Cannot allocate memory" in decision.reason


def test_a_refused_restart_is_the_death_of_an_unsettled_child() -> None:
    supervision = supervision_of(max_restarts=10)
    supervision.begin(0.0)
    supervision.hear("alive", 0.0)
    assert supervision.end(KILLED, 100.0).pause_s == 0.0
    pauses = [supervision.refuse(NO_MEMORY, now).pause_s for now in (100.0, 101.0, 102.0, 103.0)]
    assert pauses == [0.0, 0.0, 0.5, 1.0]


def test_supervisor_gives_up_after_too_many_refused_restarts() -> None:
    supervision = supervision_of(max_restarts=2)
    supervision.begin(0.0)
    decisions = [supervision.end(KILLED, 0.0), *(supervision.refuse(NO_MEMORY, float(now)) for now in (1, 2))]
    assert [each.pause_s is None for each in decisions] == [False, False, True]
    assert decisions[-1].code == 1


def test_old_restarts_do_not_count() -> None:
    supervision = supervision_of(max_restarts=1)
    assert supervision.end(KILLED, 0.0).pause_s == 0.0
    assert supervision.end(KILLED, RESTARTS_WITHIN_S).pause_s == 0.0
    assert supervision.end(KILLED, RESTARTS_WITHIN_S + 1.0).pause_s is None


def test_child_that_dies_after_a_stop_is_not_started_again() -> None:
    supervision = supervision_of()
    supervision.receive(signal.SIGTERM, 0.0)
    decision = supervision.end(KILLED, 1.0)
    assert (decision.pause_s, decision.code) == (None, 128 + signal.SIGKILL)


def test_child_that_a_passed_on_signal_ended_stays_ended() -> None:
    supervision = supervision_of()
    supervision.receive(signal.SIGHUP, 0.0)
    decision = supervision.end(-int(signal.SIGHUP), 1.0)
    assert (decision.pause_s, decision.code) == (None, 128 + signal.SIGHUP)
    assert supervision.end(KILLED, 2.0).pause_s == 0.0


def test_child_that_is_silent_from_its_start_on_is_killed() -> None:
    supervision = supervision_of(stall_s=30.0)
    supervision.begin(100.0)
    assert [supervision.is_stalled(now) for now in (219.9, 220.0)] == [False, True]


def test_start_that_may_be_silent_is_no_stall() -> None:
    supervision = Supervision(3, 30.0, is_script=True)
    supervision.begin(0.0)
    assert supervision.kills_at() is None


def test_start_that_goes_on_is_no_stall() -> None:
    supervision = supervision_of(stall_s=30.0)
    supervision.begin(0.0)
    supervision.hear("starting", 20.0)
    assert supervision.kills_at() == 50.0


def test_child_that_died_before_it_served_had_not_settled() -> None:
    supervision = supervision_of(max_restarts=10)
    pauses = []
    for now in (0.0, 100.0, 200.0, 300.0):
        supervision.begin(now)
        supervision.hear("starting", now)
        pauses.append(supervision.end(KILLED, now + 50.0).pause_s)
    assert pauses == [0.0, 0.0, 0.5, 1.0]


def test_script_that_joined_its_job_settles_and_may_be_silent() -> None:
    supervision = Supervision(10, 30.0, is_script=True)
    pauses = []
    for now in (0.0, 100.0, 200.0):
        supervision.begin(now)
        supervision.hear("joined", now + 10.0)
        assert supervision.kills_at() is None
        pauses.append(supervision.end(KILLED, now + 90.0).pause_s)
    assert pauses == [0.0, 0.0, 0.0]


def test_silent_child_is_killed_after_the_stall_time() -> None:
    supervision = supervision_of(stall_s=30.0)
    supervision.begin(0.0)
    supervision.hear("alive", 5.0)
    assert supervision.kills_at() == 35.0
    supervision.hear("alive", 20.0)
    assert supervision.kills_at() == 50.0


def test_child_is_stalled_once_the_stall_time_is_over() -> None:
    supervision = supervision_of(stall_s=30.0)
    supervision.hear("alive", 5.0)
    assert [supervision.is_stalled(now) for now in (34.9, 35.0)] == [False, True]


def test_suspension_of_the_supervisor_is_no_stall_of_its_child() -> None:
    supervision = supervision_of(stall_s=30.0)
    supervision.hear("alive", 5.0)
    assert not supervision.is_stalled(500.0)
    assert supervision.kills_at() == 530.0
    assert supervision.is_stalled(530.0)


def test_restarted_child_is_not_stalled_by_its_predecessor() -> None:
    supervision = supervision_of()
    supervision.hear("alive", 5.0)
    supervision.end(KILLED, 6.0)
    supervision.begin(10.0)
    assert supervision.kills_at() == 130.0


def test_child_that_ignores_a_stop_is_killed() -> None:
    supervision = supervision_of(stall_s=30.0)
    supervision.receive(signal.SIGTERM, 10.0)
    supervision.receive(signal.SIGINT, 20.0)
    assert supervision.kills_at() == 40.0


def test_newest_option_of_a_child_is_kept() -> None:
    supervision = supervision_of()
    for line in ("next --recover model/000001-full", "next --is-restart ", "next --recover my model/000002-delta"):
        supervision.hear(line, 0.0)
    assert supervision.options == {"--recover": "my model/000002-delta", "--is-restart": ""}


def test_generations_grow_when_the_clock_does_not() -> None:
    seconds = iter([100.9, 100.9, 50.0, 200.0])
    generations = Generations(lambda: next(seconds))
    assert [generations.draw() for _ in range(4)] == [100, 101, 102, 200]


# Real processes

SUPERVISOR = """
import itertools, sys
from fleet_sparse.supervise import Supervision, run

numbers = itertools.count()

def arguments_of(start):
    return [str(next(numbers)), str(start.generation)]

supervision = Supervision(2, float(sys.argv[1]), is_script=bool(sys.argv[2]))
sys.exit(run([sys.executable, "-c", CHILD], arguments_of, supervision, "child", has_standby=HAS_STANDBY))
"""


def supervisor_of(
    child: str,
    stall_s: float = 20.0,
    stdin: int | None = None,
    *,
    is_script: bool = False,
    standby: str = "",
    beginning: str = "",
) -> subprocess.Popen[str]:
    """A supervisor, which begins with code, of a child that runs this code, behind that of a standby.

    Its output is that of both.
    """
    of_child = "import os, signal, sys, time\nfrom fleet_sparse.lifeline import take_lifeline\n"
    of_child += "lifeline = take_lifeline()\n"
    of_child += f"if '--standby' in sys.argv:\n    {standby or 'pass'}\n"
    of_child += "    sys.argv[1:] = lifeline.await_arguments()\n"
    of_child += "    lifeline = take_lifeline()\nis_restart = sys.argv[1] != '0'\n"
    code = f"{beginning}CHILD = {of_child + child!r}\nHAS_STANDBY = {bool(standby)}\n{SUPERVISOR}"
    command = [sys.executable, "-c", code, str(stall_s), "1" * is_script]
    return subprocess.Popen(command, env=child_environment(), stdin=stdin, stdout=subprocess.PIPE, text=True)


def output_of(supervisor: subprocess.Popen[str]) -> str:
    try:
        return supervisor.communicate(timeout=END_S)[0]
    finally:
        supervisor.kill()


def line_of(supervisor: subprocess.Popen[str]) -> str:
    assert supervisor.stdout is not None
    return supervisor.stdout.readline().strip()


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_killed_child_is_started_again() -> None:
    supervisor = supervisor_of("print(int(sys.argv[2]), flush=True)\nif not is_restart: os.kill(os.getpid(), 9)")
    first, second = map(int, output_of(supervisor).split())
    assert first < second
    assert supervisor.returncode == 0


def test_killed_child_is_started_again_where_its_end_was_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as `trap '' CHLD` in the script of a container
    try:
        supervisor = supervisor_of("print('start', flush=True)\nif not is_restart: os.kill(os.getpid(), 9)")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert output_of(supervisor).split() == ["start"] * 2
    assert supervisor.returncode == 0


def test_supervisor_ends_with_the_code_of_its_child() -> None:
    supervisor = supervisor_of("sys.exit(2)")
    assert output_of(supervisor) == ""
    assert supervisor.returncode == 2


def test_child_that_always_dies_ends_the_supervisor_with_1() -> None:
    supervisor = supervisor_of("print('start', flush=True)\nsys.exit(70)")
    assert output_of(supervisor).split() == ["start"] * 3
    assert supervisor.returncode == 1


DIES_AND_MAKES_RESTARTS_FAIL = """#!/bin/sh
[ -e "$0.died" ] && exec cat
touch "$0.died"
mv "$0" "$0.away"
kill -KILL $$
"""


@pytest.fixture
def refused(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A supervisor whose child has died, up to its first restart before a pause, and the program that is not there."""
    program = tmp_path / "child"
    program.write_text(DIES_AND_MAKES_RESTARTS_FAIL)
    program.chmod(0o700)
    command, pipe = [sys.executable, "-m", "fleet_sparse.supervise", str(program)], subprocess.PIPE
    with subprocess.Popen(command, env=child_environment(), stdin=pipe, stderr=pipe, text=True) as supervisor:
        try:
            await_warning(supervisor, "again in 0.5 s: it cannot be started: [Errno 2]")
            yield supervisor, program
        finally:
            supervisor.kill()


def await_warning(supervisor: subprocess.Popen[str], text: str) -> None:
    assert supervisor.stderr is not None
    assert any(text in line for line in supervisor.stderr)


def test_a_restart_that_the_system_refuses_is_tried_again(refused: tuple[subprocess.Popen[str], Path]) -> None:
    supervisor, program = refused
    program.with_name("child.away").rename(program)
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    assert supervisor.wait(END_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_the_pause_after_a_refused_restart(
    refused: tuple[subprocess.Popen[str], Path], number: int
) -> None:
    supervisor, _ = refused
    supervisor.send_signal(number)
    assert supervisor.wait(END_S) == 0


def test_a_signal_does_not_shorten_pauses(refused: tuple[subprocess.Popen[str], Path]) -> None:
    supervisor, _ = refused
    supervisor.send_signal(signal.SIGUSR1)
    begun_at = time.monotonic()
    await_warning(supervisor, "again in 2.0 s")
    assert time.monotonic() - begun_at >= 1.0


def test_a_signal_in_a_pause_reaches_the_next_child(refused: tuple[subprocess.Popen[str], Path]) -> None:
    supervisor, program = refused
    supervisor.send_signal(signal.SIGUSR1)
    program.with_name("child.away").rename(program)
    assert supervisor.wait(END_S) == 128 + signal.SIGUSR1


def test_a_first_start_that_is_refused_is_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fleet_sparse.supervise", str(tmp_path / "no program")]
    found = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False, timeout=END_S)
    (line,) = found.stderr.splitlines()
    assert "ends: it cannot be started: [Errno 2]" in line
    assert found.returncode == 1


SEES_THE_END_FIRST = """
import select
real, ends = select.select, []

def sees_the_end_first(waited, *others):
    if ends and waited[0] in ends:
        return real(waited, *others)
    ends.append(waited[0])
    return real(waited[:1], *others)

select.select = sees_the_end_first
"""


def test_last_lines_of_a_child_are_heard() -> None:
    child = "print('start', flush=True)\nlifeline.restart_after_loss()\nlifeline.report_loss()\n"
    child += "sys.exit(not is_restart)"
    supervisor = supervisor_of(child, beginning=SEES_THE_END_FIRST)
    assert output_of(supervisor).split() == ["start"] * 2
    assert supervisor.returncode == 0


def test_stop_signal_reaches_the_child() -> None:
    child = "signal.signal(15, lambda *_: sys.exit(0))\nprint('ready', flush=True)\ntime.sleep(60)"
    supervisor = supervisor_of(child)
    assert line_of(supervisor) == "ready"
    supervisor.terminate()
    output_of(supervisor)
    assert supervisor.returncode == 0


def test_hang_up_ends_the_supervisor_with_its_child() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        supervisor = supervisor_of("print('ready', flush=True)\ntime.sleep(60)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert line_of(supervisor) == "ready"
    supervisor.send_signal(signal.SIGHUP)
    assert output_of(supervisor) == ""
    assert supervisor.returncode == 128 + signal.SIGHUP


def test_signal_that_is_ignored_does_not_reach_the_child() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        supervisor = supervisor_of("print('ready', flush=True)\nsys.stdin.readline()", stdin=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert line_of(supervisor) == "ready"
    supervisor.send_signal(signal.SIGHUP)
    assert output_of(supervisor) == ""
    assert supervisor.returncode == 0


def test_child_ends_when_its_supervisor_is_killed() -> None:
    supervisor = supervisor_of("lifeline.end_with_supervisor(60.0)\nprint(os.getpid(), flush=True)\ntime.sleep(60)")
    pid = int(line_of(supervisor))
    supervisor.kill()
    output_of(supervisor)
    wait_until(lambda: has_ended(pid))


def test_child_that_cannot_stop_ends_after_its_supervisor() -> None:
    child = "signal.signal(15, signal.SIG_IGN)\nlifeline.end_with_supervisor(0.1)\nprint(os.getpid(), flush=True)\n"
    supervisor = supervisor_of(child + "time.sleep(60)")
    pid = int(line_of(supervisor))
    supervisor.kill()
    output_of(supervisor)
    wait_until(lambda: has_ended(pid))


def test_child_that_never_says_that_it_is_alive_may_be_silent() -> None:
    child = "lifeline.restart_after_loss()\nlifeline.set_next('--a', 'b')\ntime.sleep(0.5)\nprint('end', flush=True)"
    supervisor = supervisor_of(child, stall_s=0.1, is_script=True)
    assert output_of(supervisor).split() == ["end"]
    assert supervisor.returncode == 0


def test_child_that_hangs_at_its_start_is_killed() -> None:
    child = "print('start', flush=True)\nif not is_restart: time.sleep(3600)"
    supervisor = supervisor_of(child, stall_s=1.5)
    assert output_of(supervisor).split() == ["start"] * 2
    assert supervisor.returncode == 0


def test_child_whose_start_takes_long_lives() -> None:
    child = (
        "end = time.monotonic() + 6.0\nwhile time.monotonic() < end: lifeline.note_progress(); time.sleep(0.01)\n"
        "print('end', flush=True)"
    )
    supervisor = supervisor_of(child, stall_s=5.0)
    assert output_of(supervisor).split() == ["end"]
    assert supervisor.returncode == 0


def test_suspended_child_is_killed_and_started_again() -> None:
    child = "lifeline.say('alive')\nprint('start', flush=True)\nif not is_restart: os.kill(os.getpid(), signal.SIGSTOP)"
    supervisor = supervisor_of(child, stall_s=5.0)
    assert output_of(supervisor).split() == ["start"] * 2
    assert supervisor.returncode == 0


def test_supervisor_of_a_pserver_imports_nothing_large() -> None:
    large = {"numpy", "paddle", "hashlib"}  # hashlib maps OpenSSL, of 4 MB
    code = f"import sys; from fleet_sparse.pserver import supervised; print(*({large} & {{*sys.modules}}))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, check=True, timeout=END_S
    )
    assert found.stdout.split() == []


def test_a_child_that_ends_in_order_has_time_for_it() -> None:
    child = "lifeline.say('alive')\nlifeline.report_ending()\ntime.sleep(2.0)\nprint('end', flush=True)"
    supervisor = supervisor_of(child, stall_s=1.0)
    assert output_of(supervisor).split() == ["end"]
    assert supervisor.returncode == 0


# A standby

STANDS_BY = "print('stands by', os.getpid(), flush=True)"


def test_a_standby_becomes_the_next_child_with_its_arguments() -> None:
    child = "print('serves', sys.argv[1], os.getpid(), flush=True)\nlifeline.say('alive')\nsys.stdin.readline()"
    supervisor = supervisor_of(child, stdin=subprocess.PIPE, standby=STANDS_BY)
    first, standby = line_of(supervisor).split(), line_of(supervisor).split()
    assert first[:2] == ["serves", "0"]
    os.kill(int(first[2]), signal.SIGKILL)
    assert line_of(supervisor).split() == ["serves", "1", standby[2]]
    assert line_of(supervisor).split()[:2] == ["stands", "by"]
    output_of(supervisor)
    assert supervisor.returncode == 0


def test_a_child_is_started_anew_if_its_standby_died() -> None:
    child = "print('serves', sys.argv[1], os.getpid(), flush=True)\nlifeline.say('alive')\nsys.stdin.readline()"
    supervisor = supervisor_of(child, stdin=subprocess.PIPE, standby=STANDS_BY)
    first, standby = line_of(supervisor).split(), line_of(supervisor).split()
    os.kill(int(standby[2]), signal.SIGKILL)
    wait_until(lambda: "Z" in Path(f"/proc/{standby[2]}/stat").read_text())
    os.kill(int(first[2]), signal.SIGKILL)
    second = line_of(supervisor).split()
    assert second[:2] == ["serves", "1"]
    assert second[2] != standby[2]
    output_of(supervisor)


def test_a_standby_that_is_needed_early_is_no_stall() -> None:
    """It gives signs of life for longer than the stall until it reads its arguments."""
    child = "print('serves', sys.argv[1], os.getpid(), flush=True)\nlifeline.say('alive')\nsys.stdin.readline()"
    loads = "[(lifeline.note_progress(), time.sleep(0.2)) for _ in range(15)]"
    supervisor = supervisor_of(child, 1.0, subprocess.PIPE, standby=f"{STANDS_BY}; {loads}")
    first, standby = line_of(supervisor).split(), line_of(supervisor).split()
    os.kill(int(first[2]), signal.SIGKILL)
    assert line_of(supervisor).split() == ["serves", "1", standby[2]]
    output_of(supervisor)


def test_a_standby_ends_in_order_if_its_signs_were_not_read() -> None:
    ours, theirs = socket.socketpair()
    lifeline = Lifeline(theirs.detach())
    lifeline.say(STARTING)
    ours.close()
    with pytest.raises(SystemExit) as ended:
        lifeline.await_arguments()
    assert ended.value.code == 0


def test_a_child_dead_before_it_has_its_arguments_is_replaced() -> None:
    waits = "lifeline._socket.recv(1, 2)  # MSG_PEEK: its arguments are there, and stay unread"
    child = "print('serves', sys.argv[1], flush=True)\nlifeline.say('alive')\nsys.stdin.readline()\n"
    child += "if not is_restart: os.kill(os.getpid(), signal.SIGKILL)"
    supervisor = supervisor_of(
        child, stdin=subprocess.PIPE, standby=f"{STANDS_BY}\n    {waits}\n    os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert line_of(supervisor) == "serves 0"
    assert line_of(supervisor).split()[:2] == ["stands", "by"]
    assert "serves 2" in output_of(supervisor).splitlines()
    assert supervisor.returncode == 0


def test_a_child_that_cannot_be_watched_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many"):
        Standby(["sleep", "60"], is_wanted=False).begin([])
    assert not Path(f"/proc/{pids[0]}").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_standby_ends_with_its_supervisor(number: int) -> None:
    child = "lifeline.end_with_supervisor(60.0)\nlifeline.say('alive')\ntime.sleep(60)"
    supervisor = supervisor_of(child, standby=STANDS_BY)
    pid = int(line_of(supervisor).split()[2])
    supervisor.send_signal(number)
    output_of(supervisor)
    wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize("program", [["/no/such/program"], ["true"]], ids=["is refused", "ended"])
def test_a_lost_standby_is_replaced_after_longer_pauses(
    program: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "_STANDBY_PAUSE_S", 0.5)
    standby = Standby(program, is_wanted=True)
    standby.prepare()
    wait_until(lambda: standby.prepare() or len(caplog.records) == 3)
    first, second, third = (record.created for record in caplog.records)
    assert second - first >= 0.5
    assert third - second >= 1.0
    standby.end()


def test_a_child_that_does_not_serve_has_no_standby() -> None:
    supervisor = supervisor_of("print('end', flush=True)", standby=STANDS_BY)
    assert output_of(supervisor).split() == ["end"]
