"""The worker's main thread: constructs the service and runs its calls in the order in which they were submitted.

Between calls it runs the service's `background()` as long as that returns True, so that an engine can decode between
two calls. A new call waits until `background()` returns, but no longer. A service that a later controller may adopt has
a `renew()`, which drops everything that the earlier controller requested.
"""

import importlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.base import waits
from lockstep.base.errors import CollectiveStalled, error_code
from lockstep.base.wait_state import WAITING_FOR_WORK, WaitTimeout
from lockstep.cluster.node_versions import changed_since
from lockstep.cluster.protocol import DeferredResult
from lockstep.cluster.rpc.codec import CodecError, MethodSignature, Payload, signature_of
from lockstep.cluster.rpc.rpc_messages import START_CALL_ID, CallMessage, FailureMessage, ResultMessage
from lockstep.watch.recorder import recorder

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""How long an idle service waits before `background()` is called again."""


class ServiceInterrupted(BaseException):
    """Raised in the main thread by SIGTERM, so that the process exits in order, whatever it is doing."""


class NotRenewable(RuntimeError):
    """The run's next controller cannot adopt this worker."""


class ResultSink(Protocol):
    """Receives results."""

    def answer(self, message: ResultMessage | FailureMessage, payload: Payload = b"") -> None: ...


class ServiceRunner:
    """A service, its queue of calls, and the loop that runs them."""

    def __init__(self, construct: Callable[[], object], answers: ResultSink) -> None:
        self._construct, self._answers = construct, answers
        self._object: object | None = None
        self._built_at = 0.0
        """Unix time of the construction, in seconds."""
        self._calls: deque[tuple[CallMessage, memoryview]] = deque()
        self._changed = threading.Condition()
        self._broken: FailureMessage | None = None
        self._deferred: set[DeferredResult[Any]] = set()
        """Results that are not available yet."""
        self._leaving = ""
        self._renewing = False
        self._thread = 0
        """The thread that runs the loop, which signals interrupt."""
        self._interruptible = self._interrupted = self._sending = False
        self.running = ""
        """Name of the running method, or `start`, `renew`, `background`, `close`; empty while idle."""

    @property
    def busy(self) -> bool:
        """Whether there is work whose progress a caller may wait for."""
        return bool(self.running or self._calls or self._renewing)

    @property
    def leaving(self) -> bool:
        return bool(self._leaving)

    def deliver(self, call: CallMessage, arguments: memoryview) -> None:
        """Queues a call, or runs it immediately if it is concurrent. Called from the I/O thread."""
        if self._object is not None and self._is_concurrent(call):
            self._answer(call, arguments, concurrent=True)
            return
        with self._changed:
            self._calls.append((call, arguments))
            self._changed.notify()

    def renew(self) -> None:
        """Handles a change of controller: drops queued calls of the previous one, then renews the service, which sends
        a result like the start of the service. Called from the I/O thread."""
        with self._changed:
            self._calls.clear()
            self._renewing = True
            self._changed.notify()

    def leave(self, why: str) -> None:
        """Stops the loop after the running call. Any thread may call."""
        with self._changed:
            self._leaving = self._leaving or why
            self._changed.notify()

    def interrupt(self, why: str) -> None:
        """Stops the loop, and the running call at its next Python instruction. Only for signal handlers."""
        self._leaving = self._leaving or why
        self._interrupted = True
        if not self._sending:
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        if self._interrupted and self._interruptible:
            self._interruptible = False
            raise ServiceInterrupted

    def run(self) -> None:
        """Runs the service until it must exit, then closes it."""
        self._thread = threading.get_ident()
        try:
            self._interruptible = True
            if not self._leaving:
                self._start()
            while not self._leaving:
                self._run_once()
        except ServiceInterrupted:
            log.info("interrupted in %s", self.running or "the idle loop")
        finally:
            self._interruptible = False
            self._close()

    def _send(self, message: ResultMessage | FailureMessage, payload: Payload = b"") -> None:
        """Sends a result. A signal takes effect afterwards: it would leave half of a frame on the connection, or send
        the frame twice, so that the controller refuses what follows."""
        if threading.get_ident() != self._thread:
            self._answers.answer(message, payload)
            return
        self._sending = True
        try:
            self._answers.answer(message, payload)
        finally:
            self._sending = False
        self._raise_interrupt()

    def _start(self) -> None:
        self.running = "start"
        try:
            self._object = self._construct()
            self._built_at = time.time()
        except Exception as error:  # noqa: BLE001 - whatever a constructor raises travels to the controller
            self._broken = failure_message(START_CALL_ID, error)
            self._send(self._broken)
        else:
            if not self._renewing:  # then the renewal sends the result
                self._send(ResultMessage(START_CALL_ID))
        self.running = ""

    def _run_once(self) -> None:
        """Runs a call, or else background work once; without either, waits."""
        if self._renewing:
            self._renew()
            return
        if self._calls:
            self._answer(*self._calls.popleft())
            return
        background = getattr(self._object, "background", None)
        if background is None or self._broken is not None:
            self._idle(60.0)
        elif not self._run_background(background):
            self.running = ""
            self._idle(IDLE_POLL_S)

    def _renew(self) -> None:
        self.running, self._renewing = "renew", False
        self._deferred.clear()
        try:
            if self._broken is None:
                _renew_method(self._object, self._built_at)()
        except Exception as error:  # noqa: BLE001 - whatever it raises travels to the controller
            self._broken = failure_message(START_CALL_ID, error)
        self._send(self._broken or ResultMessage(START_CALL_ID))
        self.running = ""

    def _run_background(self, background: Callable[[], bool]) -> bool:
        self.running = self.running or "background"
        try:
            return background()
        except Exception as error:
            log.exception("background work failed, the service is broken")
            self._broken = failure_message(START_CALL_ID, error)
            for deferred in list(self._deferred):
                deferred.fail(error)
            return False

    def _idle(self, seconds: float) -> None:
        with self._changed:
            if self._has_work:
                return
            try:
                waits.condition(
                    self._changed, lambda: self._has_work, waits_for="controller", why=WAITING_FOR_WORK,
                    timeout_s=seconds,
                    notice_after_s=None,
                )  # fmt: skip
            except WaitTimeout:
                return

    @property
    def _has_work(self) -> bool:
        return bool(self._calls or self._leaving or self._renewing)

    def _answer(self, call: CallMessage, arguments: memoryview, concurrent: bool = False) -> None:
        if not concurrent:
            self.running = call.method
        try:
            answer = self._execute(call, arguments, None if concurrent else self._broken)
        except Exception as raised:  # noqa: BLE001 - whatever a call raises travels to the controller
            error = recorder.translate_error(raised)
            if isinstance(error, CollectiveStalled):
                log.warning("%s was aborted: %s", call.method, error)
            answer = failure_message(call.id, error), b""
        if not concurrent:
            self.running = ""
        if answer is not None:
            self._send(*answer)

    def _execute(
        self, call: CallMessage, arguments: memoryview, broken: FailureMessage | None
    ) -> tuple[ResultMessage | FailureMessage, Payload] | None:
        """Runs a call and returns its result; None if the result is deferred."""
        if broken is not None:
            return FailureMessage(call.id, broken.kind, broken.message, broken.traceback, broken.code), b""
        method = self._method(call)
        signature = signature_of(method)
        value = method(self._object, **signature.decode_arguments(arguments))
        if isinstance(value, DeferredResult):
            deferred = value
            self._deferred.add(deferred)
            deferred.on_settled(lambda value, error: self._send_deferred(call, signature, deferred, value, error))
            return None
        return ResultMessage(call.id), signature.encode_result(value)

    def _send_deferred(
        self,
        call: CallMessage,
        signature: MethodSignature,
        deferred: DeferredResult[Any],
        value: Any,
        error: Exception | None,
    ) -> None:
        if deferred not in self._deferred:  # the controller that made the call has been replaced
            return
        self._deferred.discard(deferred)
        if error is None:
            try:
                self._send(ResultMessage(call.id, deferred.patience_s), signature.encode_result(value))
                return
            except CodecError as codec_error:
                error = codec_error
        self._send(failure_message(call.id, error), b"")

    def _method(self, call: CallMessage) -> Callable[..., Any]:
        method = None if call.method.startswith("_") else getattr(type(self._object), call.method, None)
        if not callable(method):
            raise AttributeError(f"{type(self._object).__qualname__} has no method {call.method!r}")
        return method  # type: ignore[no-any-return]

    def _is_concurrent(self, call: CallMessage) -> bool:
        method = getattr(type(self._object), call.method, None)
        return call.concurrent or bool(getattr(method, "__lockstep_concurrent__", False))

    def _close(self) -> None:
        close = getattr(self._object, "close", None)
        if close is None:
            return
        self.running = "close"
        try:
            close()
        except Exception:
            log.exception("the service's close() failed")


def _renew_method(service: object, since: float) -> Callable[[], None]:
    """Returns the service's `renew`. Raises NotRenewable if there is none, or if its code on disk has changed."""
    renew = getattr(service, "renew", None)
    if renew is None:
        raise NotRenewable(f"{type(service).__qualname__} has no renew()")
    changed = changed_since(since)
    if changed is not None:
        raise NotRenewable(f"{changed} has changed since it was loaded")
    return renew  # type: ignore[no-any-return]


def failure_message(call: int, error: BaseException) -> FailureMessage:
    """An exception in its wire form: type name, message, traceback (without this file's frames) and code."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    text = "".join(traceback.TracebackException(kind, error, trace).format())
    message = "".join(traceback.format_exception_only(error)).strip()
    message = message.removeprefix(f"{name}: ") if message != name else ""
    return FailureMessage(call, name, _escape_surrogates(message), _escape_surrogates(text), error_code(kind))


def _escape_surrogates(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def load_service(name: str, arguments: dict[str, Any]) -> object:
    """Constructs the service with the arguments as keywords.

    Raises:
        ValueError: the name is not of the form `package.module:Class`.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"service {name!r}: expected package.module:Class")
    service = importlib.import_module(module)
    for part in attribute.split("."):
        service = getattr(service, part)
    return service(**arguments)  # type: ignore[operator]
