"""A bare job: a real agent, a real supervisor, and processes without torch that do healthy work."""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.soak.finding_counts import Tally
from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.base.transport.run_token import new_run_token
from lockstep.watch.agent.agent_client import AgentClient, start_agent
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorSettings

TOKEN = new_run_token()
FOLLOWERS = ("policy-1", "policy-2", "engine-0", "reward-0")
SILENCE = 3.2
"""Duration of an activity without counter progress, in multiples of the threshold."""


class Site:
    """A context manager that ends all processes it started."""

    def __init__(
        self, folder: Path, patience: StallThresholds, seed: int, tally: Tally, environment: dict[str, str],
        followers: Sequence[str] = FOLLOWERS, acts: Sequence[str] = (), ranks: bool = False,
    ) -> None:  # fmt: skip
        """With `ranks`, two ranks that train without Lockstep run as well."""
        self.folder, self.patience, self.seed, self.tally = folder, patience, seed, tally
        self._environment, self._followers, self._acts = environment, followers, acts
        self._ranks = ranks
        self.pids: dict[str, int] = {}

    def __enter__(self) -> "Site":
        self.folder.mkdir(parents=True)
        self._run = new_run_id("soak")
        self._address = start_agent(self._run, TOKEN, self.folder, kill_grace_s=0.5)
        self._client = AgentClient(self._address, TOKEN)
        settings = SupervisorSettings(
            self._run, 1, self.folder, self.folder / "incidents", [self._address], os.getpid(), self.patience
        )
        self._supervision = SupervisorClient(settings, TOKEN, self.tally.add_event, self.tally.trouble)
        silence_s = SILENCE * self.patience.still_s
        for name in (*self._followers, "policy-0"):
            rest = self._followers if name == "policy-0" else self._acts
            self._spawn("worker", name, str(silence_s), *rest)
        for name in ("trainer-0", "trainer-1") if self._ranks else ():
            self._spawn("ranks", name, str(silence_s))
        return self

    def _spawn(self, module: str, name: str, *words: str) -> None:
        argv = [sys.executable, "-m", f"benchmarks.soak.{module}", self._run, name, str(self.folder), str(self.seed)]
        self.pids[name] = self._client.spawn(
            name, [*argv, *words], log_path=self.folder / f"{name}.log", env={**os.environ, **self._environment}
        )

    def process_ids(self) -> dict[str, int]:
        """Pids by name, agent and supervisor included."""
        supervisor = self._supervision.pid
        watchers = {"agent": self._address.pid} | ({} if supervisor is None else {"supervisor": supervisor})
        return self.pids | watchers

    def soak(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.2)
            ended = [each.name for each in self._client.list() if not each.alive]
            if ended:
                raise RuntimeError(f"{ended} ended: {(self.folder / f'{ended[0]}.log').read_text()[-2000:]}")

    def __exit__(self, *_: object) -> None:
        self._supervision.close()
        self._client.shut_down(0.2)
        shutil.rmtree(run_shm_dir(self._run), ignore_errors=True)
        self.tally.acts(self.folder / "acts.jsonl", SILENCE * self.patience.still_s * 0.94)
