"""Runs calls that have no bound of their own in threads that may be left behind."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(call: Callable[[], T], name: str) -> "Future[T]":
    """Starts the call; `waits.future` waits for the result within the caller's bound."""
    answer: Future[T] = Future()

    def make() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed over to whoever waits
            answer.set_exception(error)

    try:
        threading.Thread(target=make, name=name, daemon=True).start()
    except RuntimeError:  # the interpreter ends, and starts no thread any more
        make()
    return answer
