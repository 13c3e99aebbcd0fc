"""Deadlines interrupt what hangs and leave everything else, other people's timers included, alone."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from sinkflex.errors import DeadlineError
from sinkflex.rollout.deadline import call_in_thread, call_with_deadline


def spin() -> None:
    while True:
        pass


def spin_and_swallow() -> None:
    while True:
        try:
            spin()
        except Exception:
            continue


def in_worker(call) -> object:
    """Run ``call`` on a thread that is not the main one; return its value or its exception."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as error:
            outcome.append(error)

    worker = threading.Thread(target=run)
    worker.start()
    worker.join()
    return outcome[0]


def test_value_and_exception_pass_through() -> None:
    assert call_with_deadline(lambda: 5, timeout_s=5.0, what="env.step") == 5
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 1 / 0, timeout_s=5.0, what="env.step")


@pytest.mark.parametrize("hang", [spin, spin_and_swallow, lambda: time.sleep(5)])
def test_main_thread_is_interrupted(hang) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError, match=r"env.step took longer than 0.05 s; raise the step timeout"):
        call_with_deadline(hang, timeout_s=0.05, what="env.step")
    assert time.monotonic() - started < 2.0


def test_earlier_timer_and_handler_are_restored() -> None:
    fired: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(1))
    outer = signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        call_with_deadline(lambda: time.sleep(0.02), timeout_s=5.0, what="env.step")
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 90.0 < left < 99.99
        signal.raise_signal(signal.SIGALRM)
        assert fired == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, previous)


def test_off_the_main_thread_the_call_is_left_behind() -> None:
    assert in_worker(lambda: call_with_deadline(lambda: 5, timeout_s=5.0, what="env.step")) == 5
    error = in_worker(lambda: call_with_deadline(lambda: time.sleep(1), timeout_s=0.05, what="env.reset"))
    assert isinstance(error, DeadlineError)
    assert "env.reset took longer" in str(error)
    assert isinstance(
        in_worker(lambda: call_with_deadline(lambda: 1 / 0, timeout_s=5.0, what="env.step")), ZeroDivisionError
    )


def test_threads_let_the_loop_go_on() -> None:
    async def main() -> tuple[list[int], float]:
        started = time.monotonic()
        calls = [call_in_thread(lambda i=i: (time.sleep(0.2), i)[1], timeout_s=5.0, what="env.step") for i in range(5)]
        return await asyncio.gather(*calls), time.monotonic() - started

    values, elapsed_s = asyncio.run(main())
    assert values == [0, 1, 2, 3, 4]
    assert elapsed_s < 0.9


def test_thread_deadline_and_exception() -> None:
    async def late() -> None:
        await call_in_thread(lambda: time.sleep(0.3), timeout_s=0.05, what="env.step")

    async def broken() -> None:
        await call_in_thread(lambda: 1 / 0, timeout_s=5.0, what="env.step")

    with pytest.raises(DeadlineError, match=r"env.step took longer than 0.05 s"):
        asyncio.run(late())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(broken())
    # The call that was left behind comes back to a loop that is gone; that must not raise in its thread.
    time.sleep(0.4)
