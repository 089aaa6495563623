"""Runs calls that have no bound of their own in threads that may be left behind."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(call: Callable[[], T], name: str) -> "Future[T]":
    """The call under way; `waits.future` waits for it as long as it may take."""
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
