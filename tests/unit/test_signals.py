"""SIGTERM with the watch installed: real processes, real signals."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mindspore_exporter.signals import SignalWatch

HEAD = """
import ctypes, faulthandler, logging, os, signal, sys, threading, time
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
from mindspore_exporter import signals
from mindspore_exporter.signals import SignalWatch

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def ended(signum):
    say("ended", signum, watch.reason())

def block_in_c(seconds):
    "As a blocked collective does: C code in the main thread, without the interpreter lock; goes on after a signal."
    libc = ctypes.CDLL(None)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        libc.poll(None, 0, ctypes.c_int(int(1000 * (deadline - time.monotonic())) + 1))

def hold_the_lock(seconds):
    "As a compile does: C code in the main thread that keeps the interpreter lock, whatever signal comes."
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    say(hex(ctypes.addressof(mutex)))
    until = (ctypes.c_long * 2)(int(time.time() + seconds), int((time.time() + seconds) % 1 * 1e9))
    libc.pthread_mutex_timedlock(mutex, until)

watch = SignalWatch(ended, limit=3.0)
"""


class Child:
    """A Python process that runs a script after HEAD; its lines are read with a deadline."""

    def __init__(self, script: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *options, "-c", HEAD + textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdout is not None
        self.descriptor = self.process.stdout.fileno()
        self.buffer = b""

    def line(self, limit: float = 20.0) -> str:
        deadline = time.monotonic() + limit
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.descriptor, 4096) if ready else b""
            assert chunk, f"no line within {limit} s; so far {self.buffer!r}; {self.errors()}"
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode()

    def send(self, signum: int) -> None:
        self.process.send_signal(signum)

    def status(self, limit: float = 20.0) -> int:
        """The exit code, or minus the signal that killed the process."""
        return self.process.wait(limit)

    def errors(self) -> str:
        self.kill()
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def run(script: str, *options: str) -> Child:
        children.append(Child(script, *options))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        for stream in (child.process.stdout, child.process.stderr):
            assert stream is not None
            stream.close()


@pytest.mark.parametrize("busy", ["time.sleep(60)", "block_in_c(60)", "[None for _ in iter(int, 1)]"])
def test_sigterm_publishes_the_end_and_then_kills_the_process(start: Start, busy: str) -> None:
    child = start(f"say(watch.install()); {busy}")
    assert child.line() == "True"
    child.send(signal.SIGTERM)
    assert child.line() == "ended 15 sigterm"
    assert child.status() == -signal.SIGTERM


def test_sigterm_during_a_compile_publishes_as_soon_as_the_interpreter_lock_is_free(start: Start) -> None:
    child = start("watch.install(); hold_the_lock(1.0); block_in_c(60)")
    wait_until_held(child)
    child.send(signal.SIGTERM)
    assert child.line() == "ended 15 sigterm"
    assert child.status() == -signal.SIGTERM


def test_the_main_thread_takes_no_further_step_while_the_end_is_published(start: Start) -> None:
    child = start(
        """
        steps = 0
        def ended(signum):
            before = steps
            time.sleep(0.5)
            say("steps", steps - before)
        watch = SignalWatch(ended)
        watch.install()
        say("ready")
        while True:
            time.sleep(0.01)
            steps += 1
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.line() in ("steps 0", "steps 1")
    assert child.status() == -signal.SIGTERM


def test_an_end_that_hangs_is_given_up_at_its_limit(start: Start) -> None:
    child = start(
        "watch = SignalWatch(lambda signum: (say('hangs'), time.sleep(60)), limit=0.5); watch.install();"
        " say('ready'); block_in_c(60)"
    )
    child.line()
    child.send(signal.SIGTERM)
    child.line()
    assert child.status(5.0) == -signal.SIGTERM


def test_an_error_while_publishing_does_not_change_the_wait_status(start: Start) -> None:
    child = start("watch = SignalWatch(lambda signum: 1 / 0); watch.install(); say('ready'); block_in_c(60)")
    child.line()
    child.send(signal.SIGTERM)
    assert child.status() == -signal.SIGTERM
    assert "ZeroDivisionError" in child.errors()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("busy", ["time.sleep(60)", "block_in_c(60)"])
def test_a_second_signal_ends_the_process_at_once(start: Start, second: int, busy: str) -> None:
    child = start(
        "watch = SignalWatch(lambda signum: (say('lingers'), time.sleep(60)), limit=60.0); watch.install();"
        f" say('ready'); {busy}"
    )
    child.line()
    child.send(signal.SIGTERM)
    child.line()
    child.send(second)
    assert child.status(5.0) == -signal.SIGTERM


def test_a_second_sigterm_ends_a_process_whose_interpreter_lock_is_never_released(start: Start) -> None:
    child = start("watch.install(); hold_the_lock(60)")
    wait_until_held(child)
    child.send(signal.SIGTERM)
    wait_until(lambda: not catches_sigterm(child.process.pid))
    assert child.process.poll() is None
    child.send(signal.SIGTERM)
    assert child.status(5.0) == -signal.SIGTERM


def test_a_signal_to_the_process_group_ends_the_process_with_the_same_status(start: Start) -> None:
    child = start("watch.install(); say('ready'); block_in_c(60)")
    child.line()
    os.killpg(child.process.pid, signal.SIGTERM)
    assert child.line() == "ended 15 sigterm"
    assert child.status() == -signal.SIGTERM


def test_a_handler_of_the_user_runs_as_before_and_the_end_is_only_published(start: Start) -> None:
    child = start(
        """
        signal.signal(signal.SIGTERM, lambda signum, frame: (say("user", signum), time.sleep(0.5), sys.exit(7)))
        watch.install()
        say("ready")
        time.sleep(60)
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert {child.line(), child.line()} == {"user 15", "ended 15 sigterm"}
    assert child.status() == 7


def test_a_handler_that_the_user_installs_later_runs_and_decides_alone(start: Start) -> None:
    child = start(
        """
        watch.install()
        before = signal.getsignal(signal.SIGTERM)
        def of_the_user(signum, frame):
            if callable(before):
                before(signum, frame)
            say("user", signum)
        signal.signal(signal.SIGTERM, of_the_user)
        say("ready")
        while True:
            time.sleep(0.01)
        """
    )
    child.line()
    for _ in range(2):
        child.send(signal.SIGTERM)
        assert {child.line(), child.line()} == {"user 15", "ended 15 sigterm"}
    assert child.process.poll() is None


def test_a_user_who_restores_our_handler_and_sends_the_signal_again_is_killed_by_it(start: Start) -> None:
    child = start(
        """
        watch.install()
        before = signal.getsignal(signal.SIGTERM)
        def of_the_user(signum, frame):
            signal.signal(signum, before)
            os.kill(os.getpid(), signum)
        signal.signal(signal.SIGTERM, of_the_user)
        say("ready")
        time.sleep(60)
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.status() == -signal.SIGTERM


def test_an_ignored_sigterm_stays_ignored(start: Start) -> None:
    child = start("signal.signal(15, signal.SIG_IGN); say(watch.install()); time.sleep(0.5); say('lives')")
    assert child.line() == "False"
    child.send(signal.SIGTERM)
    assert child.line() == "lives"
    assert child.status() == 0


def test_a_handler_of_a_c_library_is_left_alone(start: Start) -> None:
    # faulthandler stands for any library: its handler is C, and Python's signal module does not know of it.
    child = start("faulthandler.register(15, chain=False); say(watch.install()); time.sleep(0.5); say('lives')")
    assert child.line() == "False"
    child.send(signal.SIGTERM)
    assert child.line() == "lives"
    assert child.status() == 0
    assert "a C library handles it" in child.errors()


def test_nothing_is_installed_outside_the_main_thread(start: Start) -> None:
    child = start(
        """
        thread = threading.Thread(target=lambda: say(watch.install()))
        thread.start(); thread.join()
        say(signal.getsignal(15) is signal.SIG_DFL, threading.active_count())
        """
    )
    assert (child.line(), child.line()) == ("False", "True 1")


def test_the_init_process_of_a_container_goes_on_as_the_kernel_lets_it(start: Start) -> None:
    child = start(
        """
        signals._is_init = lambda: True
        watch.install()
        say("ready")
        while True:
            time.sleep(0.01)
        """
    )
    child.line()
    for _ in range(2):
        child.send(signal.SIGTERM)
        assert child.line() == "ended 15 sigterm"
    assert child.process.poll() is None


# --- the sender -------------------------------------------------------------------------------------------------------


def test_the_sender_of_a_sigterm_from_outside_is_known(start: Start) -> None:
    child = start(
        "watch = SignalWatch(lambda signum: say('from', watch.sender_pid())); watch.install(); say('ready');"
        " block_in_c(60)"
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.line() == f"from {os.getpid()}"


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
def test_a_sigterm_of_the_process_to_itself_is_told_apart(start: Start, options: tuple[str, ...]) -> None:
    script = "watch.install(); threading.Timer(0.1, os.kill, (os.getpid(), 15)).start(); block_in_c(60)"
    child = start(script, *options)
    assert child.line() == "ended 15 self_terminated"
    assert child.status() == -signal.SIGTERM


def test_a_sigterm_of_unknown_origin_is_a_sigterm(start: Start) -> None:
    # Blocked in the main thread, it is handled in another thread, which has no alternate stack.
    child = start(
        """
        watch.install()
        threading.Thread(target=block_in_c, args=(60,), daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [15])
        say("ready")
        block_in_c(60)
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.line() == "ended 15 sigterm"
    assert child.status() == -signal.SIGTERM


def test_no_reason_but_sigterm_before_any_signal() -> None:
    watch = SignalWatch(lambda signum: None)
    assert (watch.reason(), watch.sender_pid()) == ("sigterm", None)


# --- SIGINT -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_raises_keyboard_interrupt_as_before(start: Start) -> None:
    child = start(
        """
        watch.install()
        try:
            say("ready")
            time.sleep(60)
        except KeyboardInterrupt:
            say("interrupted")
        """
    )
    child.line()
    child.send(signal.SIGINT)
    assert child.line() == "interrupted"
    assert child.status() == 0


# --- other owners of the wakeup descriptor ------------------------------------------------------------------------------


def test_a_wakeup_descriptor_of_somebody_else_gets_every_signal_and_is_put_back(start: Start) -> None:
    child = start(
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGUSR1, lambda signum, frame: None)
        watch.install()
        say("ready")
        say("forwarded", os.read(reader, 1)[0])
        watch.uninstall()
        say("restored", signal.set_wakeup_fd(-1) == writer)
        """
    )
    child.line()
    child.send(signal.SIGUSR1)
    assert child.line() == f"forwarded {int(signal.SIGUSR1)}"
    assert child.line() == "restored True"


def test_nothing_is_written_to_a_file_that_took_the_number_of_a_closed_wakeup_descriptor(
    start: Start, tmp_path: os.PathLike[str]
) -> None:
    child = start(
        f"""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        watch.install()
        os.close(writer)
        checkpoint = os.open({str(tmp_path)!r} + "/checkpoint", os.O_CREAT | os.O_RDWR)
        say(checkpoint == writer)
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        os.kill(os.getpid(), 15)
        time.sleep(0.2)
        watch.uninstall()
        say(os.fstat(checkpoint).st_size, signal.set_wakeup_fd(-1))
        """
    )
    assert [child.line() for _ in range(3)] == ["True", "ended 15 sigterm", "0 -1"]


def test_sigterm_works_under_asyncio_which_takes_the_wakeup_descriptor(start: Start) -> None:
    child = start(
        """
        import asyncio
        watch.install()
        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: None)
            say("ready")
            await asyncio.sleep(60)
        asyncio.run(main())
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.line() == "ended 15 sigterm"
    assert child.status() == -signal.SIGTERM


# --- forked children ----------------------------------------------------------------------------------------------------


def test_a_forked_child_dies_of_sigterm_as_before_and_its_parent_goes_on(start: Start) -> None:
    child = start(
        """
        watch.install()
        os.register_at_fork(after_in_child=watch.abandon_in_child)
        worker = os.fork()
        if worker == 0:
            time.sleep(60)
        os.kill(worker, 15)
        _, status = os.waitpid(worker, 0)
        say(os.WTERMSIG(status))
        time.sleep(0.2)
        say("goes on")
        """
    )
    assert (child.line(), child.line()) == ("15", "goes on")
    assert child.status() == 0


def test_a_forked_child_holds_no_descriptor_and_no_wakeup_of_the_watch(start: Start) -> None:
    child = start(
        """
        before = set(os.listdir("/proc/self/fd"))
        watch.install()
        os.register_at_fork(after_in_child=watch.abandon_in_child)
        worker = os.fork()
        if worker == 0:
            say(sorted(set(os.listdir("/proc/self/fd")) - before), signal.set_wakeup_fd(-1),
                signal.getsignal(15) == signal.SIG_DFL, os.getpid() != os.getppid())
            os._exit(0)
        os.waitpid(worker, 0)
        """
    )
    assert child.line() == "[] -1 True True"


def test_a_signal_to_a_child_that_a_c_library_forked_does_not_end_the_parent(start: Start) -> None:
    child = start(
        """
        watch.install()
        worker = ctypes.PyDLL(None).fork()  # no hook of Python runs: the child shares the watch's socket
        if worker == 0:
            block_in_c(60)
        time.sleep(0.2)
        os.kill(worker, 15)
        time.sleep(0.5)
        say("goes on")
        os.kill(worker, 9)
        os.waitpid(worker, 0)
        """
    )
    assert child.line() == "goes on"
    assert child.status() == 0


# --- the end of the watch -------------------------------------------------------------------------------------------------


def test_uninstall_leaves_no_thread_no_descriptor_and_the_old_handlers() -> None:
    before = (set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGTERM))
    watch = SignalWatch(lambda signum: None)
    for _ in range(100):
        assert watch.install()
        assert watch.install()
        watch.uninstall()
        watch.uninstall()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGTERM)) == before
    wakeup = signal.set_wakeup_fd(-1)
    assert wakeup == -1


def test_a_sigterm_after_uninstall_kills_at_once(start: Start) -> None:
    child = start("watch.install(); watch.uninstall(); say('ready'); block_in_c(60)")
    child.line()
    child.send(signal.SIGTERM)
    assert child.status() == -signal.SIGTERM


def test_our_handler_put_back_after_uninstall_acts_as_the_default(start: Start) -> None:
    child = start(
        """
        watch.install()
        ours = signal.getsignal(15)
        signal.signal(15, lambda signum, frame: None)
        watch.uninstall()
        signal.signal(15, ours)
        say("ready")
        time.sleep(60)
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.status() == -signal.SIGTERM


def test_uninstall_in_another_thread_does_nothing(start: Start) -> None:
    child = start(
        """
        watch.install()
        thread = threading.Thread(target=watch.uninstall)
        thread.start(); thread.join()
        say("ready")
        block_in_c(60)
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.line() == "ended 15 sigterm"
    assert child.status() == -signal.SIGTERM


def test_a_training_that_ends_while_sigterm_is_published_is_still_killed_by_it(start: Start) -> None:
    child = start(
        """
        entered = threading.Event()
        watch = SignalWatch(lambda signum: (entered.set(), time.sleep(0.5)))
        watch.install()
        signal.pthread_sigmask(signal.SIG_BLOCK, [15])  # the handler runs in another thread: the main thread goes on
        threading.Thread(target=block_in_c, args=(60,), daemon=True).start()
        say("ready")
        entered.wait(20)
        watch.uninstall()
        say("not reached")
        """
    )
    child.line()
    child.send(signal.SIGTERM)
    assert child.status() == -signal.SIGTERM
    assert "not reached" not in child.errors()


def test_sigterm_kills_a_process_whose_interpreter_has_ended_already(start: Start) -> None:
    # A C library's destructor that hangs: no Python code runs any more.
    child = start(
        """
        watch.install()
        libc = ctypes.CDLL(None)
        getattr(libc, "__cxa_atexit")(ctypes.cast(libc.pause, ctypes.c_void_p), None, None)
        say("ready")
        """
    )
    child.line()
    wait_until(lambda: not catches_sigterm(child.process.pid))
    child.send(signal.SIGTERM)
    assert child.status(5.0) == -signal.SIGTERM


def catches_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)))


def wait_until_held(child: Child) -> None:
    """The main thread waits for the mutex of `hold_the_lock`: its futex call has the mutex's address."""
    mutex = child.line()

    def waits() -> bool:
        with open(f"/proc/{child.process.pid}/syscall") as syscall:
            return mutex in syscall.read().split()

    wait_until(waits)


def wait_until(fact: Callable[[], bool], limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while not fact():
        assert time.monotonic() < deadline, f"not within {limit} s"
        time.sleep(0.01)
