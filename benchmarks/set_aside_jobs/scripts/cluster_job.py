"""Small programs of Ray: rollout actors, Serve, Tune, environments of tasks. `cluster_job.py NAME`."""

import logging
import os
import sys
import time

import ray

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s rollout_driver %(message)s")
log = logging.getLogger("rollouts")


@ray.remote(num_cpus=0.5)
class Player:
    def __init__(self, number):
        self.number, self.played = number, 0

    def pid(self):
        return os.getpid()

    def play(self, game, fault=""):
        self.played += 1
        if fault == "zero" and self.number == 1 and self.played == 5:
            return {"wins": 3 / (self.played - 5)}
        if fault == "hang" and self.number == 1 and self.played == 5:
            time.sleep(600)
        if fault == "flaky" and self.played % 4 == 0:
            raise ConnectionResetError("game server reset the connection")
        time.sleep(0.1)
        return {"wins": game % 2}


def start(**about):
    about = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000} | about
    ray.init(**about)


def rounds(fault="", count=10, limit=None):
    players = [Player.remote(number) for number in range(2)]
    log.info("players run as %s", ray.get([each.pid.remote() for each in players]))
    for number in range(count):
        asked = [each.play.remote(number, fault) for each in players]
        try:
            wins = sum(each["wins"] for each in ray.get(asked, timeout=limit))
            log.info("round %d of %d: %d wins", number + 1, count, wins)
        except ConnectionResetError as error:
            log.warning("round %d lost, played again: %s", number + 1, str(error).strip().splitlines()[-1])
    log.info("all rounds played")


def healthy():
    start()
    rounds("flaky", 14)
    ray.shutdown()


def zero():
    start()
    rounds("zero")


def hang():
    start()
    rounds("hang", limit=15)


def environment():
    start()

    @ray.remote(runtime_env={"working_dir": "/mnt/code/agents-2026-11.zip"})
    def grade():
        return 1

    log.info("grade: %s", ray.get(grade.remote()))


def tune():
    from ray import tune

    start()

    def trial(config):
        score = 0.0
        for step in range(12):
            score += config["rate"]
            tune.report({"score": score, "step": step})

    scheduler = tune.schedulers.ASHAScheduler(metric="score", mode="max", max_t=12, grace_period=2)
    found = tune.Tuner(
        trial, param_space={"rate": tune.grid_search([0.1, 0.2, 0.5])},
        tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=1),
    ).fit()  # fmt: skip
    log.info("best rate %s", found.get_best_result("score", "max").config["rate"])


def serve():
    from ray import serve

    start()

    @serve.deployment(health_check_period_s=2, health_check_timeout_s=3, ray_actor_options={"num_cpus": 0.5})
    class Scorer:
        def __init__(self):
            self.began = time.time()

        def check_health(self):
            if time.time() - self.began > 12:
                raise RuntimeError("scorer: tokenizer cache is gone")

        def __call__(self, text):
            return len(text)

    handle = serve.run(Scorer.bind())
    for number in range(14):
        log.info("score %d: %s", number, handle.remote("ab" * number).result(timeout_s=20))
        time.sleep(2)


def client():
    log.info("connecting to the cluster")
    ray.init("ray://127.0.0.1:10099")


def reserve():
    start()
    from ray.util.placement_group import placement_group

    group = placement_group([{"CPU": 2}, {"CPU": 2}], strategy="STRICT_SPREAD")
    log.info("waiting for 2 bundles on 2 nodes")
    for minute in range(3):
        if group.wait(8):
            return
        log.warning("placement group is still not ready after %d s: %s", 8 * minute + 8,
                    ray.util.placement_group_table(group)["state"])  # fmt: skip
    raise TimeoutError("no placement after 24 s; cluster has " + str(ray.cluster_resources().get("CPU")) + " CPUs")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
