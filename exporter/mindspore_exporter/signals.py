"""SIGTERM publishes the final state and ends the process as it would have ended without the exporter.

A Python signal handler runs when the main thread is back in Python: after the all-reduce that blocks, or the compile.
The interpreter's C handler does run at once and writes the signal's number to the wakeup descriptor, which a watcher
thread reads. The watcher has the state published, restores the default action and sends the signal again, so that the
wait status is "killed by SIGTERM".

SIGINT is left alone. Until the first step it is Python's and raises KeyboardInterrupt. From the first step on MindSpore
puts its own C handler in place at every step (`SignalGuard`, `DefaultIntHandler` in libmindspore_common), which sends
SIGTERM to the process: whatever a Python program installs for SIGINT lasts until the next step, and Ctrl-C arrives here
as SIGTERM. `SignalWatch.reason` still tells them apart, see `_SignalStack`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import platform
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

log = logging.getLogger(__name__)

_STOP = 0xF0
_PUBLISHED = 0xF1
"""Our own bytes on the wakeup socket; signal numbers end at 64."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SA_SIGINFO = 0x4
_SA_RESETHAND = 0x80000000
_FLAGS_OFFSET = 136
"""Offset of sa_flags in struct sigaction: a pointer and a 128-byte mask come before it (glibc and musl, 64 bit)."""
_SIGACTION_BYTES = 152
_SS_DISABLE = 2
_STACK_BYTES = 128 * 1024
"""Ten times the largest signal frame known (x86-64 with AMX state: 11 KiB)."""


class SignalWatch:
    """Watches SIGTERM while a run lasts.

    `ended(signum)` runs in a thread of its own, publishes the final state, lingers, and has to return within `limit`
    seconds; the process ends after `limit` seconds anyway. A second SIGTERM or SIGINT ends it at once.

    Where the process has its own Python handler for SIGTERM, that handler runs as before and `ended` only publishes.
    The same holds for a process with the number 1, which the default action of SIGTERM does not end.
    """

    def __init__(self, ended: Callable[[int], None], limit: float = 5.0) -> None:
        self._ended = ended
        self._limit = limit
        self._handler = self._on_sigterm
        self._previous_wakeup: _Descriptor | None = None
        self._thread: threading.Thread | None = None
        self._publisher: threading.Thread | None = None
        self._ending = False
        self._origin: _Origin | None = None

    def install(self) -> bool:
        """Start to watch; True when SIGTERM is watched from now on.

        False, with the reason in the log, outside the main thread, where SIGTERM is ignored, where a C library handles
        it, and on a platform without these system calls.
        """
        if self._thread is not None:
            return True
        obstacle = _why_not_watched()
        if obstacle is not None:
            log.info("exporter: SIGTERM is not watched: %s", obstacle)
            return False
        try:
            self._start()
        except (OSError, RuntimeError) as error:
            log.warning("exporter: SIGTERM is not watched: %s", error)
            self._release()
            return False
        atexit.register(self.uninstall)
        return True

    def uninstall(self) -> None:
        """Put everything back as it was; nothing of the watch is left. Main thread only, elsewhere it does nothing.

        Runs at interpreter exit by itself: past that point no Python code could end the process any more.
        """
        if self._thread is None or threading.current_thread() is not threading.main_thread():
            return
        if self._ending:
            self._wait_for_the_end()
        # The handler stays until the watcher has dealt with what came before: no signal falls between the two.
        self._sender.send(bytes([_STOP]))
        self._thread.join()
        self._release()
        if self._publisher is not None:
            self._publisher.join(self._limit)
        atexit.unregister(self.uninstall)

    def abandon_in_child(self) -> None:
        """In a forked child: it dies of SIGTERM as before and holds no descriptor of the watch. Takes no lock."""
        if self._thread is None:
            return
        ours = signal.getsignal(signal.SIGTERM) == self._handler
        if ours and self._libc.handler_address(signal.SIGTERM) == 0:
            # SA_RESETHAND did that: SIGTERM came right after the fork, where the interpreter forgets pending signals.
            self._libc.end_process_by(signal.SIGTERM)
        self._release()

    def sender_pid(self) -> int | None:
        """Process that sent the last SIGTERM; 0 when it is in another process namespace, None when unknown."""
        return None if self._origin is None else self._origin.pid

    def reason(self) -> str:
        """End reason of the last SIGTERM: `keyboard_interrupt`, `self_terminated` (MindSpore ends a process whose
        peers or scheduler are gone in this way) or `sigterm`, also when the sender is unknown."""
        if self._origin is None or self._origin.pid != os.getpid():
            return "sigterm"
        return "keyboard_interrupt" if self._origin.within_sigint else "self_terminated"

    def _start(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        # A child between fork and exec, or forked by a C library, shares this socket: its bytes are told by its pid.
        self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._libc = _Libc()
        self._stack = _SignalStack(self._libc)
        self._previous_wakeup = _Descriptor.of(signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False))
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handler)
            # SA_RESETHAND: a second SIGTERM ends the process even while something holds the interpreter lock.
            self._libc.add_flags(signal.SIGTERM, _SA_SIGINFO | (0 if _is_init() else _SA_RESETHAND))
        thread = threading.Thread(target=self._watch, name="mindspore-exporter-signals", daemon=True)
        thread.start()
        self._thread = thread

    def _release(self) -> None:
        self._thread = None
        if signal.getsignal(signal.SIGTERM) == self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if hasattr(self, "_sender"):
            current = signal.set_wakeup_fd(-1)
            if current != self._sender.fileno():
                signal.set_wakeup_fd(current)
            elif self._previous_wakeup is not None and self._previous_wakeup.is_same_file():
                signal.set_wakeup_fd(self._previous_wakeup.number)
            self._sender.close()
            self._receiver.close()

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if signal.getsignal(signum) != self._handler:
            return  # a handler installed after ours calls us from habit and decides alone
        if self._thread is None:
            self._libc.end_process_by(signum)  # put back by somebody after the watch: it stands for the default action
            return
        if self._wakeup_descriptor_was_taken():
            self._sender.send(bytes([signum]))
        if not _is_init():
            self._wait_for_the_end()

    def _wakeup_descriptor_was_taken(self) -> bool:
        ours = self._sender.fileno()
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current != ours:
            signal.set_wakeup_fd(current)
        return current != ours

    def _wait_for_the_end(self) -> None:
        """Hold the main thread: a process that SIGTERM has ended takes no further step."""
        deadline = time.monotonic() + self._limit + 1.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
        self._libc.end_process_by(signal.SIGTERM)

    def _watch(self) -> None:
        # Nothing here may wait for a lock that the main thread could hold inside its handler: no logging.
        while (byte := self._next_byte(None)) != _STOP:
            if byte != signal.SIGTERM:
                continue
            self._origin = self._stack.origin_of(signal.SIGTERM)
            if signal.getsignal(signal.SIGTERM) != self._handler or _is_init():
                self._publish()
            else:
                self._ending = True
                self._publish()
                self._wait_until_published()
                self._libc.end_process_by(signal.SIGTERM)

    def _publish(self) -> None:
        publisher = threading.Thread(target=self._call_ended, name="mindspore-exporter-end", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started any more
            publisher.start()
            self._publisher = publisher

    def _call_ended(self) -> None:
        try:
            log.warning(
                "exporter: SIGTERM (%s): publishing the final state, for at most %g s; a second signal ends at once",
                self.reason(),
                self._limit,
            )
            self._ended(int(signal.SIGTERM))
        except Exception:
            log.exception("exporter: the final state could not be published")
        with contextlib.suppress(OSError):
            self._sender.send(bytes([_PUBLISHED]))

    def _wait_until_published(self) -> None:
        deadline = time.monotonic() + self._limit
        while self._publisher is not None and (remaining := deadline - time.monotonic()) > 0:
            if self._next_byte(remaining) in (_PUBLISHED, *_ENDING_SIGNALS):
                return

    def _next_byte(self, timeout: float | None) -> int | None:
        """The next signal number or byte of our own; None after `timeout` seconds and for another process's byte."""
        self._receiver.settimeout(timeout)
        try:
            data, ancillary, _, _ = self._receiver.recvmsg(1, socket.CMSG_SPACE(12))
        except TimeoutError:
            return None
        if not data:
            return _STOP
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, _, _ = struct.unpack("3i", content)
                if pid != os.getpid():
                    return None
        if data[0] < _STOP and self._previous_wakeup is not None:
            self._previous_wakeup.write(data)
        return data[0]


def _why_not_watched() -> str | None:
    if threading.current_thread() is not threading.main_thread():
        return "only the main thread can install a signal handler"
    if platform.system() != "Linux":
        return "only Linux lets a thread tell who wrote to the wakeup socket"
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_IGN:
        return "the process ignores it"
    if handler is None or (handler is signal.SIG_DFL and _Libc().handler_address(signal.SIGTERM) != 0):
        return "a C library handles it"
    return None


def _is_init() -> bool:
    """Whether the process is the init of its namespace (a container without an init): the kernel keeps the default
    action of SIGTERM away from it."""
    return os.getpid() == 1


@dataclass(frozen=True)
class _Descriptor:
    """A wakeup descriptor that somebody else set, and the file behind it: the number alone may be reused."""

    number: int
    file: tuple[int, int]

    @classmethod
    def of(cls, number: int) -> _Descriptor | None:
        if number == -1:
            return None
        status = os.fstat(number)
        return cls(number, (status.st_dev, status.st_ino))

    def is_same_file(self) -> bool:
        try:
            status = os.fstat(self.number)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self.file

    def write(self, data: bytes) -> None:
        if self.is_same_file():
            with contextlib.suppress(OSError):
                os.write(self.number, data)


class _StackT(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


class _Libc:
    """The system calls that `signal` offers to the main thread only, made without giving up the interpreter lock."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(None, use_errno=True)
        self._sigaction = library.sigaction
        self._sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._sigaltstack = library.sigaltstack
        self._sigaltstack.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._kill = library.kill
        self._kill.argtypes = (ctypes.c_int, ctypes.c_int)

    def handler_address(self, signum: int) -> int:
        """Address of the handler in place; 0 is the default action, 1 is ignore."""
        action = self._action(signum)
        return int.from_bytes(action[:8], "little")

    def add_flags(self, signum: int, flags: int) -> None:
        action = self._action(signum)
        present = int.from_bytes(action[_FLAGS_OFFSET : _FLAGS_OFFSET + 4], "little")
        action[_FLAGS_OFFSET : _FLAGS_OFFSET + 4] = (present | flags).to_bytes(4, "little")
        self._set_action(signum, action)

    def end_process_by(self, signum: int) -> None:
        """Restore the default action and send the signal, from any thread. Returns only where that does not end us."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
        self._set_action(signum, bytearray(_SIGACTION_BYTES))
        self._kill(os.getpid(), signum)

    def signal_stack(self) -> _StackT:
        """The calling thread's alternate signal stack."""
        stack = _StackT()
        self._check(self._sigaltstack(None, ctypes.byref(stack)))
        return stack

    def set_signal_stack(self, stack: _StackT) -> None:
        self._check(self._sigaltstack(ctypes.byref(stack), None))

    def _action(self, signum: int) -> bytearray:
        action = bytearray(_SIGACTION_BYTES)
        self._check(self._sigaction(signum, None, (ctypes.c_char * _SIGACTION_BYTES).from_buffer(action)))
        return action

    def _set_action(self, signum: int, action: bytearray) -> None:
        self._check(self._sigaction(signum, (ctypes.c_char * _SIGACTION_BYTES).from_buffer(action), None))

    @staticmethod
    def _check(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@dataclass(frozen=True)
class _Origin:
    """Where a signal came from: the sender's process, and whether it hit the main thread inside a SIGINT handler."""

    pid: int
    within_sigint: bool


class _SignalStack:
    """Reads what the kernel left on the main thread's alternate signal stack when a Python-handled signal came.

    Python shows neither a signal's sender nor the interrupted context. The kernel writes both (`struct rt_sigframe`) to
    the stack on which the handler runs, and Python's C handler runs on the alternate stack where there is one. A signal
    to the process goes to the main thread unless that thread blocks it. MindSpore's SIGINT handler sends SIGTERM from
    within, while SIGINT is blocked: the saved mask of the SIGTERM frame shows it.

    The sender is written only for a handler installed with SA_SIGINFO. Kernel and calling convention pass the same
    arguments with and without that flag; Python's handler reads the first.

    The frame is found by its own copy of the stack's address and size; then come `siginfo` and the mask at offsets of
    arch/x86/include/asm/sigframe.h and arch/arm64/kernel/signal.c in Linux. What does not look right is unknown.
    """

    _OFFSETS = {"x86_64": (288, 280), "aarch64": (-144, 24)}  # noqa: RUF012 - constant
    _memory = ctypes.create_string_buffer(_STACK_BYTES)
    """Never freed: the kernel may write to it as long as the process lives."""

    def __init__(self, libc: _Libc) -> None:
        stack = libc.signal_stack()
        if stack.flags & _SS_DISABLE:
            stack = _StackT(ctypes.addressof(self._memory), 0, _STACK_BYTES)
            libc.set_signal_stack(stack)
        self._base = int(stack.base)
        self._size = int(stack.size)

    def origin_of(self, signum: int) -> _Origin | None:
        """Origin of the last such signal, None when it cannot be told."""
        offsets = self._OFFSETS.get(os.uname().machine)
        try:
            content = self._read()
        except OSError:
            return None
        address = self._base.to_bytes(8, "little")
        size = self._size.to_bytes(8, "little")
        at = content.rfind(address)
        while offsets is not None and at != -1:
            if content[at + 16 : at + 24] == size:
                return _parse_frame(content, at + offsets[0], at + offsets[1], signum)
            at = content.rfind(address, 0, at)
        return None

    def _read(self) -> bytes:
        # The stack may be somebody else's and gone: a read by the kernel fails where a read of ours would crash.
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, self._size, self._base)
        finally:
            os.close(descriptor)


def _parse_frame(content: bytes, info_at: int, mask_at: int, signum: int) -> _Origin | None:
    if info_at < 0 or max(info_at + 24, mask_at + 8) > len(content):
        return None
    number, error, _, _, pid, _ = struct.unpack_from("6i", content, info_at)
    (mask,) = struct.unpack_from("Q", content, mask_at)
    if number != signum or error != 0 or pid < 0:
        return None
    return _Origin(pid, bool(mask & (1 << (signal.SIGINT - 1))))
