"""Jobs of PyTorch Lightning: two ranks on gloo, or one process."""

from benchmarks.set_aside_jobs.entry import Entry

_TRAIN = "cp $S/lightning_job.py train.py; "
_FRAMEWORK = "PyTorch Lightning"


def _entry(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, _FRAMEWORK, cls, _TRAIN + script, venv="lightning", **about)  # type: ignore[arg-type]


ENTRIES = [
    _entry("lightning-ddp-bars", "benign", "python train.py --bar --epochs 2 --rows 256", host="ws-berta"),
    _entry(
        "lightning-resumed",
        "benign",
        "python train.py --epochs 3 --rows 128 --print_every 4; "
        "echo '--- restarted'; python train.py --resume checkpoints/$(ls checkpoints | tail -1) "
        "--epochs 5 --rows 128 --print_every 4",
        home="/home/anneli/probe",
    ),
    _entry(
        "lightning-early-stop",
        "benign",
        "python train.py --early --lr 0.02 --epochs 30 --print_every 10 --devices 1",
    ),
    _entry("lightning-slow-validation", "benign", "python train.py --val_seconds 2.5 --epochs 3 --print_every 2 --bar"),
    _entry("lightning-time-budget", "benign", "python train.py --max_seconds 12 --step_seconds 0.2 --epochs 99 --json"),
    _entry(
        "lightning-loss-spike",
        "benign",
        "python train.py --spike_at 31 --epochs 6 --rows 512 --json --lr 0.003",
        home="/mnt/work/tabular",
    ),
    _entry(
        "lightning-bad-row",
        "rank_exception_masked",
        "python train.py --bad_row 77 --epochs 3 --print_every 4 --rows 160",
        culprit=(1,),
    ),
    _entry(
        "lightning-export-barrier",
        "rank_divergent_branch",
        "python train.py --export --epochs 3 --print_every 4",
        culprit=(0,),
        alt=((1,), (0, 1)),
        also_ok=("checkpoint_timeout",),
    ),
    _entry(
        "lightning-lasting-nan",
        "nan_or_inf",
        "python train.py --log_of_zero 20 --early --epochs 9 --print_every 4 --rows 128 --devices 1",
    ),
    _entry(
        "lightning-anomaly",
        "nan_or_inf",
        "python train.py --log_of_zero 12 --epochs 9 --print_every 2 --bar",
        host="lab-4",
    ),
    _entry(
        "lightning-short-checkpoint",
        "storage_fault",
        "python train.py --devices 1 --epochs 2 --rows 64 > /dev/null 2>&1; f=checkpoints/$(ls checkpoints | tail -1); "
        "truncate -s 5000 $f; python train.py --resume $f --epochs 4 --print_every 2",
        culprit=None,
    ),
    _entry(
        "lightning-loader-worker",
        "external_kill",
        "python train.py --workers 2 --kill_worker_at 90 --epochs 3 --print_every 2 --rows 200",
        culprit=(1,),
        also_ok=("host_oom", "rank_exception_masked"),
        sufficiency="hint",
    ),
    _entry(
        "lightning-fewer-rows",
        "uneven_data",
        "python train.py --own_sampler --fewer_rows 64 --epochs 3 --print_every 3 --rows 192",
        culprit=(0,),
        also_ok=("rank_divergent_branch",),
    ),
    _entry(
        "lightning-interrupted",
        "external_kill",
        "timeout -s INT 16 python train.py --epochs 90 --step_seconds 0.1 --bar --devices 1",
        also_ok=("benign",),
    ),
    _entry("lightning-no-gpu", "config_error", "python train.py --accelerator gpu", also_ok=("gpu_binding",)),
]
