"""Running an environment's code under a deadline.

On a Unix main thread a timer signal interrupts the code itself, at no cost in threads. Elsewhere (Windows, a
worker thread) the code runs on a daemon thread that is left behind when the deadline passes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from sinkflex.errors import DeadlineError

_T = TypeVar("_T")
# The signal fires again at this interval, for code that swallowed the first interruption.
_REPEAT_S = 0.5


class _Expired(BaseException):
    """Not an ``Exception``, so that a broad handler in the interrupted code does not swallow it."""


def call_with_deadline(call: Callable[[], _T], *, timeout_s: float, what: str) -> _T:
    """Run ``call`` here and interrupt it when the time is up.

    Args:
        call: code to run; it must survive being interrupted anywhere, or be thrown away after it.
        timeout_s: seconds, positive.
        what: names the call in the message, for example ``"env.step"``.

    Raises:
        DeadlineError: the call took longer.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        runner = _Runner(call)
        if not runner.done.wait(timeout_s):
            raise _too_slow(what, timeout_s)
        return runner.result()
    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, _interrupt)
    previous_s, previous_repeat_s = signal.setitimer(signal.ITIMER_REAL, timeout_s, _REPEAT_S)
    try:
        try:
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Expired:
        raise _too_slow(what, timeout_s) from None
    finally:
        signal.signal(signal.SIGALRM, previous_handler)
        if previous_s:
            left_s = max(previous_s - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, previous_repeat_s)


async def call_in_thread(call: Callable[[], _T], *, timeout_s: float, what: str) -> _T:
    """Run ``call`` on a daemon thread of its own while the event loop goes on.

    Args:
        call: code that may block, for example on a network.
        timeout_s: seconds, positive; a call that takes longer is left behind on its thread.
        what: names the call in the message.

    Raises:
        DeadlineError: the call took longer.
    """
    loop = asyncio.get_running_loop()
    finished = asyncio.Event()

    def wake() -> None:
        # The loop may have closed by the time a call that was left behind comes back.
        if not loop.is_closed():
            loop.call_soon_threadsafe(finished.set)

    runner = _Runner(call, on_done=wake)
    try:
        await asyncio.wait_for(finished.wait(), timeout_s)
    except TimeoutError:
        raise _too_slow(what, timeout_s) from None
    return runner.result()


class _Runner(Generic[_T]):
    """One call on one daemon thread."""

    def __init__(self, call: Callable[[], _T], *, on_done: Callable[[], None] | None = None) -> None:
        self.done = threading.Event()
        self._call = call
        self._on_done = on_done
        self._value: list[_T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="sinkflex-env", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # handed to whoever waits
            self._error = error
        self.done.set()
        if self._on_done is not None:
            self._on_done()

    def result(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._value[0]


def _interrupt(signum: int, frame: FrameType | None) -> Any:
    raise _Expired


def _too_slow(what: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(f"{what} took longer than {timeout_s:g} s; raise the step timeout or fix what it waits on")
