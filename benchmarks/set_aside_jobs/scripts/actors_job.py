"""Jobs of Ray: actors that die, hang or are retried, tasks without resources. `actors_job.py MODE`."""

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import ray

MODE = sys.argv[1]
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s driver: %(message)s")
log = logging.getLogger("driver")


@ray.remote(num_cpus=0)
class Sampler:
    def __init__(self, number):
        self.number, self.lock = number, __import__("threading").Lock()

    def sample(self, step):
        if self.number == 2 and step == 4 and MODE == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.number == 2 and step == 4 and MODE == "crashed":
            __import__("ctypes").string_at(0)
        if self.number == 1 and step == 4 and MODE == "hung":
            print("sampler 1 takes the lock of its tree")
            self.lock.acquire()
            self.lock.acquire()
        if self.number == 0 and step == 4 and MODE == "bound":
            raise ValueError(f"temperature must be positive, got {-0.1 * step}")
        return [0.1 * step] * 4


@ray.remote(num_cpus=0, max_retries=3, retry_exceptions=[ConnectionError])
def fetch(part, flag):
    if part == 3 and not Path(flag).exists():
        Path(flag).touch()
        raise ConnectionError(f"part {part}: connection reset by peer, 3 more attempts")
    return part


@ray.remote(resources={"H100": 1})
def update(step):
    return step


@ray.remote(num_cpus=0)
class Counter:
    """Is restarted once."""

    def __init__(self):
        self.value = 0

    def add(self, step):
        self.value += 1
        flag = Path(f"/tmp/counter-struck-{os.getppid()}")
        if step == 5 and not flag.exists():
            flag.touch()
            os._exit(1)
        return self.value


def sampled():
    samplers = [Sampler.options(name=f"sampler-{n}").remote(n) for n in range(3)]
    for step in range(1, 9):
        for number, each in enumerate(samplers):
            try:
                ray.get(each.sample.remote(step), timeout=20)
            except ray.exceptions.GetTimeoutError:
                log.error("step %d: no samples from sampler-%d in 20 s, the others have answered", step, number)
                raise
        log.info("step %d: samples of 3 samplers, mean reward %.2f", step, 0.1 * step)
    log.info("all steps done")


def main():
    own = tempfile.mkdtemp(prefix="r", dir="/tmp")
    ray.init(address="local", num_cpus=4, include_dashboard=False, _temp_dir=own)
    if MODE == "retried":
        flag = f"/tmp/fetched-{os.getpid()}"
        parts = ray.get([fetch.remote(n, flag) for n in range(6)])
        counter = Counter.options(max_restarts=2, max_task_retries=2).remote()
        for step in range(1, 9):
            log.info("step %d counter %d", step, ray.get(counter.add.remote(step)))
            time.sleep(0.2)
        log.info("fetched %s, done", parts)
    elif MODE == "resource":
        pending = update.remote(1)
        for waited in range(1, 4):
            done, _ = ray.wait([pending], timeout=15)
            log.info("update 1: %d of 1 finished after %d s", len(done), 15 * waited)
        log.error("update 1 never started: cluster has %s", sorted(ray.cluster_resources()))
        sys.exit(3)
    elif MODE == "unpicklable":
        lock = __import__("threading").Lock()

        @ray.remote
        def locked():
            return lock.locked()

        ray.get(locked.remote())
    else:
        sampled()


if __name__ == "__main__":
    main()
