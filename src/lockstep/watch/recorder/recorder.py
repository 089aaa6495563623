"""The recorder runs inside a rank. It records the rank's calls on its communicators, and executes commands.

It needs the standard library and the torch that the program uses. An internal error of the recorder never fails the
job: the error is counted, the first one is logged, and the job continues unrecorded. docs/recorder.md describes what
is recorded for each library, backend and version of torch.

    recorder.install()  # when the beacon is open, before communicators are created
"""

import atexit
import contextlib
import functools
import importlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.base.folders import write_atomically
from lockstep.watch.beacon.beacon_records import digest64
from lockstep.watch.beacon.call_ring import CallRings
from lockstep.watch.beacon.writer import Beacon, current_beacon
from lockstep.watch.recorder import abort, commands, import_hook
from lockstep.watch.recorder.c10d_status import C10dStatusReader
from lockstep.watch.recorder.collective_order import OrderCheck
from lockstep.watch.recorder.communicator import CommunicatorMember, host_blocking_devices, recovered_at
from lockstep.watch.recorder.operations import CallSites
from lockstep.watch.recorder.rendezvous_wait import group_init_wait, member_list_digest
from lockstep.watch.recorder.torch_fit import check_torch, create_arguments
from lockstep.watch.recorder.wrappers import (
    C10D_MODULE,
    FUNCTIONAL_MODULE,
    CollectiveWrappers,
    contain_errors,
    wrap_wait,
)

log = logging.getLogger(__name__)

POLL_S = 0.1


class Recorder:
    """Records the collectives of this process. One per process.

    Args:
        refuse: check the order of collectives against the peers on this host, and refuse a wrong call.
        keepalive: make gloo's sockets detect dead links.
        scope: distinguishes communicators with equal names (a role and its generation).
    """

    def __init__(self, own: Beacon, rings: CallRings, refuse: bool, keepalive: bool, scope: str) -> None:
        self.rings, self._own, self._refuse, self._keepalive, self.scope = rings, own, refuse, keepalive, scope
        self.run = own.path.parent.name
        self.inbox = commands.CommandInbox(self.run, own.path.stem)
        self.missing: list[str] = []
        """Features that this torch lacks, as text."""
        self.failures = 0
        """Internal errors of the recorder."""
        self._torch: Any = None
        self._wait: Any = None
        self._members: dict[Any, CommunicatorMember] = {}
        """Memberships by c10d's process group."""
        self.member_cache: dict[Any, CommunicatorMember | None] = {}
        """Memberships by the values that callers pass as `group`: a process group, None, a name or a mesh."""
        self._unrecorded: set[str] = set()
        self._worlds = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # --- attach and detach

    def attach(self, torch: Any) -> None:
        """Patches torch.distributed."""
        self._c10d = sys.modules[C10D_MODULE]
        self.missing += check_torch(self._c10d)
        self.sites = CallSites(self.rings, torch.__file__)
        self._c10d_status = C10dStatusReader(torch._C._distributed_c10d)
        self._wrappers = CollectiveWrappers(self, torch)
        self._torch = torch
        self._wrappers.patch(self._c10d)
        import_hook.when_imported(FUNCTIONAL_MODULE, self._wrappers.patch_functional)
        self._patch_groups()
        self._wrappers.patch_copies()
        self._patch_wait(torch._C._distributed_c10d.Work)
        self._report_missing_features(torch)
        for group in list(self._c10d._world.pg_map):
            self.add_communicator(group)

    def detach(self) -> None:
        """Restores torch.distributed. Recorded calls remain in the beacon."""
        self._stop.set()
        if self._thread is not None and self._thread.is_alive() and os.getpid() == self._pid:
            self._thread.join(2.0)
        self._restore()
        for member in self._members.values():
            member.close()
        self._members.clear()
        self.member_cache.clear()

    def detach_in_child(self) -> None:
        """Restores torch.distributed in a forked child, without touching the beacon, which belongs to the parent."""
        self._restore()

    def _restore(self) -> None:
        if self._torch is not None:
            import_hook.cancel_import_hook(FUNCTIONAL_MODULE)
            self._wrappers.undo()
            if self._wait is not None:
                self._torch._C._distributed_c10d.Work.wait = self._wait
            self._torch = None

    def _patch_groups(self) -> None:
        c10d = self._c10d
        create = c10d._new_process_group_helper

        @functools.wraps(create)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            threads_before = _own_threads()
            ranks: Sequence[int] = ()
            shown_wait: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            with contain_errors(self):
                ranks, name, description = create_arguments(create, args, kwargs).values()
                shown_wait = group_init_wait(self._own, c10d.GroupMember.WORLD, ranks, str(name), description)
            with shown_wait:
                result = create(*args, **kwargs)
            with contain_errors(self):
                self.add_communicator(result[0], ranks, abort.find_gloo_thread(_own_threads() - threads_before))
            return result

        self._wrappers.replace(c10d, "_new_process_group_helper", create, wrapper)
        for name in ("destroy_process_group", "_abort_process_group"):
            if hasattr(c10d, name):
                self._wrappers.replace(c10d, name, getattr(c10d, name), self._wrap_destroy(getattr(c10d, name)))

    def _wrap_destroy(self, destroy: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(destroy)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return destroy(*args, **kwargs)
            finally:
                with contain_errors(self):
                    self._forget_destroyed()

        return wrapper

    def _patch_wait(self, work: Any) -> None:
        self._wait = work.wait
        work.wait = wrap_wait(self._wait, self.translate)

    def _report_missing_features(self, torch: Any) -> None:
        kinds = {flight.kind for flight in self._c10d_status.flight_recorders}
        if "gloo" not in kinds:
            self.missing.append("gloo: completed collectives are not counted, and calls from C++ have no entries")
        if torch.distributed.is_nccl_available() and not kinds & {"nccl"}:
            self.missing.append("NCCL: no flight recorder in JSON, completed collectives are not counted")
        if os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")) == "0":
            self.missing.append("the flight recorder is switched off (TORCH_FR_BUFFER_SIZE=0)")
        for gap in self.missing:
            log.info("recorder, torch %s: %s", getattr(torch, "__version__", "?"), gap)
            self._own.event("recorder", gap)

    # --- communicators

    def member(self, group: Any) -> CommunicatorMember | None:
        """The membership of this process in a communicator (`group` None: the default one); None if there is none."""
        try:
            return self.member_cache[group]
        except KeyError:
            found = self._find(group)
            if found is not None:
                self.member_cache[group] = found
            return found
        except TypeError:  # a list of ranks
            return self._find(group)

    def _find(self, given: Any) -> CommunicatorMember | None:
        group = given
        if group is None:
            group = self._c10d.GroupMember.WORLD
        elif not hasattr(group, "_get_sequence_number_for_group"):
            group = self._resolve(group)
        known = None if group is None else self._members.get(group)
        return known if known is not None else self.add_communicator(group)

    def _resolve(self, group: Any) -> Any:
        """The process group for an argument of a functional collective: a name, ranks, or a mesh (and dimension)."""
        funcol = sys.modules.get(FUNCTIONAL_MODULE)
        resolve = getattr(funcol, "_resolve_group_name", None)
        if resolve is None or group is self._c10d.GroupMember.NON_GROUP_MEMBER:
            return None
        name = group if isinstance(group, str) else resolve(group, "")
        return next((each for each, known in self._c10d._world.pg_names.items() if known == name), None)

    def add_communicator(
        self, group: Any, ranks: Sequence[int] = (), loop_thread: int = 0
    ) -> CommunicatorMember | None:
        """Starts recording the calls of this process on a communicator. `loop_thread` is gloo's thread for the
        communicator, if known."""
        if group is None or group not in self._c10d._world.pg_map:
            return None
        with self._lock:
            known = self._members.get(group)
            if known is not None:
                return known
            world = self._c10d._world
            name = str(world.pg_names[group])
            self._worlds += not self._members
            ranks = [int(rank) for rank in ranks or world.pg_group_ranks.get(group) or range(group.size())]
            description = str(getattr(group, "group_desc", "") or "")
            backend = str(world.pg_backend_config.get(group) or world.pg_map[group][0])
            slot = self.rings.open_slot(
                self._identity(group, name), member_list_digest(ranks), name, description, backend, group.size(),
                group.rank(), loop_thread, on_device=host_blocking_devices(backend) is not None,
            )  # fmt: skip
            if slot is None:
                if not self._unrecorded:
                    log.warning("recorder: no room for communicator %s; it is not recorded", name)
                self._unrecorded.add(name)
                return None
            label = description if description not in ("", "undefined") else name
            member = CommunicatorMember(group, slot, name, label, ranks, group.rank())
            if self._refuse and group.size() > 1:
                member.run, member.order_check = self.run, self._open_order_check(member)
            self._members[group] = member
            self.member_cache.clear()
            self._start_thread()
            return member

    def _open_order_check(self, member: CommunicatorMember) -> OrderCheck | None:
        try:
            return OrderCheck(self.run, member.slot.identity, member.rank, self._own.path.stem, member.slot.index)
        except (OSError, OverflowError) as error:
            log.warning("recorder: the order of calls on %s is not checked against its peers: %s", member.label, error)
            return None

    def _identity(self, group: Any, name: str) -> int:
        """A number that is equal on all members: a digest of the store's address, the count of worlds, and the name."""
        store = self._c10d._world.pg_map[group][1]
        store = getattr(store, "_underlying_non_prefix_store", store)
        address = getattr(store, "port", None) or getattr(store, "path", "")
        return digest64(f"{self.scope}|{address}|{self._worlds}|{name}")

    def _forget_destroyed(self) -> None:
        with self._lock:
            for group, member in list(self._members.items()):
                if group not in self._c10d._world.pg_map:
                    del self._members[group]
                    self._c10d_status.forget(member)
                    member.close()
            self.member_cache.clear()

    # --- the thread

    def _start_thread(self) -> None:
        """Starts the thread with the first communicator; a process without one needs no thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="lockstep-recorder", daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S) and self._own.call_rings() is not None:
            with contain_errors(self):
                self.poll_once()

    def poll_once(self) -> None:
        """Updates counts, enables keepalive on new links, and executes commands; takes about 20 microseconds."""
        self._own.beat()
        self._c10d_status.update(self._members.values())
        if self._keepalive:
            self._enable_keepalive()
        for command in self.inbox.take():
            with contain_errors(self):
                self._execute(command)

    def _enable_keepalive(self) -> None:
        for member in list(self._members.values()):
            if member.keepalive_rounds < 2 and member.slot.loop_thread:
                abort.enable_keepalive(None, [member.slot.loop_thread])
                member.keepalive_rounds += 1

    # --- commands

    def _execute(self, command: commands.RankCommand) -> None:
        if command.op == "dump":
            done = self._dump(Path(command.body["folder"]))
        elif command.op == "free":
            done = self.abort_communicators(command.body.get("communicator"))
        else:
            done = 0
        self._own.event("order", f"{command.number} {command.op} {done}")

    def _dump(self, folder: Path) -> int:
        for flight in self._c10d_status.flight_recorders:
            text = flight.text()
            raw = text.encode() if isinstance(text, str) else bytes(text)
            name = self._own.path.stem + ("" if flight.kind == "gloo" else f"-{flight.kind}")
            write_atomically(folder / f"{name}.json", raw)
        return len(self._c10d_status.flight_recorders)

    def abort_communicators(self, communicator: str | None = None) -> int:
        """Aborts the communicator with this name, description or identity in hex (None: all communicators); returns
        the number of broken connections."""
        broken = 0
        for member in list(self._members.values()):
            names = (member.name, member.label, f"{member.slot.identity:016x}")
            if communicator is None or communicator in names:
                slot = member.slot
                aborters = abort.aborters_for(slot.backend, member.group, slot.loop_thread)
                broken += sum(each.abort() for each in aborters)
        return broken

    def translate(self, error: Exception) -> Exception:
        """The verdict that explains the error of a broken connection, as an exception; else the error itself."""
        try:
            return self.inbox.translate(error, recovered_at(list(self._members.values())))
        except (OSError, ValueError) as failure:
            self.record_failure(failure)
            return error

    def record_failure(self, error: Exception) -> None:
        """Counts an internal error; logs the first one."""
        self.failures += 1
        if self.failures == 1:
            log.warning("the recorder failed (the job continues; further failures are only counted)", exc_info=error)
            with contain_errors(None):
                self._own.event("recorder", f"failed: {error!r}")


def _own_threads() -> set[int]:
    try:
        return abort.list_threads()
    except OSError:
        return set()


_current: Recorder | None = None


def current() -> Recorder | None:
    """The recorder of this process; None if none is installed."""
    return _current


def install(*, refuse: bool = False, keepalive: bool = False, scope: str = "") -> Recorder | None:
    """Starts recording. Call it before communicators are created; a second call only changes `scope`.

    Returns None without torch.distributed or an open beacon, or if this torch cannot be patched, which is logged."""
    global _current
    if _current is not None:
        _current.scope = scope
        return _current
    torch, own = importlib.import_module("torch"), current_beacon()
    rings = own.call_rings()
    if rings is None or not importlib.import_module("torch.distributed").is_available():
        return None
    _current = new = Recorder(own, rings, refuse, keepalive, scope)
    atexit.register(uninstall)
    with contain_errors(new):
        new.attach(torch)
    if new.failures:
        uninstall()
    return _current


def uninstall() -> None:
    """Stops recording and restores torch.distributed."""
    global _current
    previous, _current = _current, None
    if previous is not None:
        atexit.unregister(uninstall)
        previous.detach()


def translate_error(error: Exception) -> Exception:
    """Translates the error of a call from C++ (in a backward pass), which no wrapper sees; see `Recorder.translate`."""
    return error if _current is None else _current.translate(error)


def raise_if_stalled() -> None:
    """Raises CollectiveStalled if Lockstep has released this rank from a collective. Callers use it before steps that
    must not follow a failed collective: an optimizer step, a publish, a commit."""
    found = None if _current is None else _current.inbox.stalled(after=math.inf)
    if found is not None:
        raise found


def _forget_in_child() -> None:
    # A forked child shares the parent's beacon but does not have the recorder's thread.
    global _current
    previous, _current = _current, None
    if previous is not None:
        previous.detach_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
