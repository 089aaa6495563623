"""Ray's core: actors, tasks, placement. Needs an environment with Ray (script/bootstrap --scale)."""

from benchmarks.job_makers.make_jobs import Job

RAY = "Ray"


def _ray(name, cls, what, culprit=None, *, before="", after="", log="driver.log", **truth):
    script = f"{before}\ntimeout 150 python ray_program.py {what} > out/{log} 2>&1\n{after}"
    return Job(name, RAY, cls, script, culprit, env=".venv-scale", **truth)


JOBS = (
    _ray("h-ray-actors", "benign", "h-actors", fix="Nothing to fix: the actors leave at the end."),
    _ray("h-ray-retried", "benign", "h-retried", fix="Nothing to fix: lost tasks were retried and all parts came."),
    _ray("h-ray-cancelled", "benign", "h-cancelled", fix="Nothing to fix: the program cancelled tasks on purpose."),
    _ray(
        "ray-actor-raises",
        "rank_exception_masked",
        "actor-raises",
        (1,),
        fix="A division by zero in the step of rank 1.",
    ),
    _ray(
        "ray-actor-killed",
        "external_kill",
        "actor-killed",
        (0,),
        also=("ray_node_or_gcs", "host_oom", "rank_exception_masked", "unknown"),
        sufficiency="hint",
        fix="The actor of rank 0 got SIGKILL.",
    ),
    _ray(
        "ray-actor-exits",
        "rank_exception_masked",
        "actor-exits",
        (1,),
        also=("ray_node_or_gcs", "unknown", "external_kill"),
        sufficiency="hint",
        fix="The code of the actor of rank 1 exits with status 3.",
    ),
    _ray(
        "ray-actor-slow",
        "slow_collective_timeout",
        "actor-slow",
        (1,),
        also=("slow_rank_preprocess", "unknown", "ray_node_or_gcs", "rank_exception_masked"),
        sufficiency="hint",
        fix="A step of rank 1 took longer than the driver waits.",
    ),
    _ray(
        "ray-task-file",
        "storage_fault",
        "task-raises",
        also=("rank_exception_masked",),
        fix="A part is not on the mount.",
    ),
    _ray("ray-infeasible", "ray_resources_pending", "infeasible", fix="The task asks for a GPU, the cluster has none."),
    _ray(
        "ray-group-pending", "ray_resources_pending", "group-pending", fix="Eight CPUs are asked for, there are three."
    ),
    _ray(
        "ray-memory",
        "host_oom",
        "memory",
        before="export RAY_memory_usage_threshold=0.05 RAY_memory_monitor_refresh_ms=200",
        also=("ray_node_or_gcs",),
        fix="Ray's memory monitor ended the task.",
    ),
    _ray(
        "ray-object-lost",
        "ray_node_or_gcs",
        "object-lost",
        also=("rank_exception_masked", "external_kill"),
        fix="The owner of the object was killed, so the object is lost.",
    ),
    _ray(
        "ray-unpicklable", "mp_start_method", "unpicklable", also=("rank_exception_masked",), fix="A lock is captured."
    ),
    _ray(
        "ray-no-module",
        "version_mismatch",
        "no-module",
        also=("config_error", "rank_exception_masked"),
        fix="The package is not installed where the tasks run.",
    ),
    _ray(
        "ray-no-cluster",
        "master_unreachable",
        "no-cluster",
        also=("ray_node_or_gcs",),
        fix="No cluster is where the driver connects to.",
    ),
    _ray("ray-store", "config_error", "store-too-large", also=("shm_too_small", "host_oom"), fix="A store of 10 TB."),
    _ray(
        "ray-interrupted",
        "external_kill",
        "interrupted",
        before="hit SIGINT self:ray_program out/driver.log 'update 30/500' ",
        also=("benign",),
        fix="Its user pressed Ctrl-C.",
    ),
)
