"""Runs of `lockstep train`: what the console printed, and for some the text files of the run's folder."""

from benchmarks.set_aside_jobs.entry import Entry

_J = "python $S/lockstep_job.py "


def _entry(
    name: str, cls: str, options: str = "", strike: str = "", collect: bool = False, script: str = "", **about: object
) -> Entry:
    run = f"{_J}prepare {options}; " + (f"{_J}strike {strike} & " if strike else "") + "lockstep train run.yaml; wait; "
    run = (script or run) + (f"{_J}collect $OUT; " if collect else "") + ":"
    return Entry(name, "Lockstep", cls, run, **about)  # type: ignore[arg-type]


ENTRIES = [
    _entry("lockstep-grpo", "benign", "steps=16"),
    _entry("lockstep-sft-folder", "benign", "recipe=sft steps=20", collect=True),
    _entry("lockstep-engine-replaced", "benign", "steps=20", "engine-0 7 SIGKILL", collect=True),
    _entry("lockstep-rank-replaced", "benign", "steps=20", "policy-1 9 SIGKILL", host="a100-3"),
    _entry("lockstep-rank-frozen", "benign", "steps=16", "policy-0 6 SIGSTOP", collect=True, host="a100-3"),
    _entry("lockstep-slow-judge", "benign", "steps=14 reward=judged"),
    _entry(
        "lockstep-reward-lookup",
        "rank_exception_masked",
        "reward=lookup",
        collect=True,
        culprit=("scorer-0",),
        alt=(("lookup",), ("rewards.py",)),
        also_ok=("config_error",),
    ),
    _entry(
        "lockstep-controller-killed",
        "external_kill",
        "steps=40",
        "controller 11 SIGKILL",
        collect=True,
        culprit=("controller",),
        also_ok=("host_oom",),
        sufficiency="hint",
    ),
    _entry("lockstep-broken-row", "config_error", "bad_row=37", also_ok=("storage_fault",)),
    _entry("lockstep-no-data", "config_error", "data=/mnt/share/sort/train.jsonl", also_ok=("storage_fault",)),
    _entry("lockstep-interrupted", "external_kill", "steps=60", "controller 12 SIGINT", also_ok=("benign",)),
    _entry(
        "lockstep-resumed",
        "benign",
        script=f"{_J}prepare steps=24; {_J}strike controller 9 SIGINT & lockstep train run.yaml; wait; "
        "lockstep train --resume runs/copy-digit; ",
        collect=True,
    ),
    _entry(
        "lockstep-same-folder",
        "storage_fault",
        script=f"{_J}prepare steps=400 reward=judged; lockstep train run.yaml > first.txt 2>&1 & c=$!; "
        f"for i in $(seq 100); do sleep 1; grep -q 'step 1/' first.txt && break; done; "
        "lockstep train --resume runs/copy-digit; kill -TERM $c; wait $c; ",
        also_ok=("config_error",),
    ),
    _entry("lockstep-huge-rate", "nan_or_inf", "steps=14 lr=1.0e+30 recipe=sft", also_ok=("config_error",)),
]
