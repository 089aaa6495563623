"""Jobs of Ray's libraries on one node."""

from benchmarks.set_aside_jobs.entry import Entry

_JOB = "cp $S/ray_job.py driver.py; unset TMPDIR; export RAY_raylet_start_wait_time_s=150; "


def _entry(name: str, framework: str, cls: str, options: str, before: str = "", **about: object) -> Entry:
    return Entry(name, framework, cls, f"{_JOB}{before}python driver.py {options}", venv="scale", **about)  # type: ignore[arg-type]


ENTRIES = [
    _entry("ray-train-linear", "Ray Train", "benign", "train --epochs 6"),
    # The host was too busy to start Ray: with the default of 30 s, which the others raise.
    _entry(
        "ray-start-too-slow",
        "Ray Train",
        "ray_node_or_gcs",
        "train --bad_partition",
        before="unset RAY_raylet_start_wait_time_s; ",
    ),
    _entry("ray-train-partition", "Ray Train", "rank_exception_masked", "train --bad_partition", culprit=(1,)),
    _entry("ray-train-asks-gpus", "Ray Train", "ray_resources_pending", "train --gpu", before="timeout -s INT 70 "),
    _entry("ray-tune-sweep", "Ray Tune", "benign", "tune"),
    _entry(
        "ray-tune-errors",
        "Ray Tune",
        "rank_exception_masked",
        "tune --lr_limit 0.25",
        also_ok=("config_error",),
        sufficiency="root",
    ),
    _entry("ray-data-tokens", "Ray Data", "benign", "data"),
    _entry(
        "ray-data-bad-row",
        "Ray Data",
        "rank_exception_masked",
        "data --null_row",
        also_ok=("storage_fault", "config_error"),
    ),
    _entry("ray-data-cut-file", "Ray Data", "rank_exception_masked", "data --bad_file", also_ok=("storage_fault",)),
    _entry(
        "ray-group-spread",
        "Ray placement groups",
        "ray_resources_pending",
        "group --strategy STRICT_SPREAD --bundles 3 --patience 35",
    ),
    _entry("ray-group-pack", "Ray placement groups", "benign", "group --bundles 2"),
    _entry("ray-actor-restarted", "Ray actors", "benign", "actors --kill_at 3"),
    _entry(
        "ray-actor-hoards",
        "Ray actors",
        "host_oom",
        "actors --hoard 60 --patience 120",
        before='export RAY_memory_usage_threshold=$(python -c "import psutil; m = psutil.virtual_memory(); '
        'print((m.total - m.available + 2500e6) / m.total)") RAY_memory_monitor_refresh_ms=100; ',
        culprit=None,
    ),
    _entry(
        "ray-judges-wait",
        "Ray actors",
        "remote_service_timeout",
        "judges --patience 20",
        also_ok=("unknown", "framework_bug"),
        sufficiency="hint",
    ),
    _entry("ray-raylet-gone", "Ray actors", "ray_node_or_gcs", "actors --steps 60 --kill_raylet", sufficiency="root"),
    _entry("ray-serve-scorer", "Ray Serve", "benign", "serve", limit_s=200),
    _entry(
        "ray-serve-weights",
        "Ray Serve",
        "storage_fault",
        "serve --weights /models/scorer/weights.txt",
        also_ok=("config_error", "rank_exception_masked"),
        limit_s=200,
    ),
]
