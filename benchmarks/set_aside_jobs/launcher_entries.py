"""Hand-written gloo loops under other launchers: mpirun, docker compose, Kubernetes, srun, log shippers."""

from benchmarks.set_aside_jobs.entry import Entry

_JOB = 'cp $S/loop_job.py train.py; cp $S/launch.py $S/reward_service.py $TMPDIR; L="python $TMPDIR/launch.py"; '
_SERVICE = "python $TMPDIR/reward_service.py 28417 {} & p=$!; sleep 4; "
_URL = "--reward_url http://127.0.0.1:28417/score "
_GERMAN = (
    "localedef -i de_DE -f UTF-8 $TMPDIR/de_DE.UTF-8 2> /dev/null; "
    "export LOCPATH=$TMPDIR LC_ALL=de_DE.UTF-8 LANGUAGE=de; "
)


def _entry(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _JOB + script, **about)  # type: ignore[arg-type]


ENTRIES = [
    _entry(
        "mpi-two-ranks",
        "MPI, gloo loop",
        "benign",
        "$L --style mpi -- python train.py --noisy --steps 24 --save_every 8",
    ),
    _entry(
        "mpi-dtypes",
        "MPI, gloo loop",
        "rank_divergent_branch",
        "$L --style mpi --grace 3 -- python train.py --bad_dtype 14 --steps 40",
        culprit=(1,),
        alt=((0,), (0, 1)),
    ),
    _entry(
        "mpi-too-many-files",
        "MPI, gloo loop",
        "os_limits",
        "$L --style mpi --grace 4 -- python train.py --nofile 90 --shards 120",
        culprit=(1,),
        home="/gpfs/proj/sct/train",
    ),
    _entry(
        "compose-resumed",
        "docker compose, gloo loop",
        "benign",
        "$L --style compose -- python train.py --logs color --steps 16 --save_every 8; "
        "$L --style compose -- python train.py --logs color --steps 30 --save_every 8 --resume",
        home="/workspace",
    ),
    _entry(
        "compose-killed",
        "docker compose, gloo loop",
        "external_kill",
        "$L --style compose --signal 1:25:SIGKILL -- python train.py --logs color --steps 400",
        culprit=(1,),
        also_ok=("host_oom",),
        sufficiency="hint",
        home="/workspace",
    ),
    _entry(
        "kubectl-reward-retries",
        "Kubernetes, gloo loop",
        "benign",
        _SERVICE.format("6 4 503")
        + "$L --style kubectl -- python train.py --logs plain --steps 20 "
        + _URL
        + "; kill $p",
        home="/app",
    ),
    _entry(
        "kubectl-reward-gone",
        "Kubernetes, gloo loop",
        "remote_service_timeout",
        _SERVICE.format("600 15 503")
        + "$L --style kubectl --stamp rl-6c5d --grace 4 -- python train.py --logs plain --steps 40 "
        + _URL
        + "; kill $p",
        home="/app",
    ),
    _entry(
        "fluent-steady",
        "Kubernetes, JSON lines",
        "benign",
        "timeout -s KILL 40 $L --style fluent --stamp lm-pre -- python train.py --logs json --steps 900 | head -90",
        home="/app",
    ),
    _entry(
        "fluent-cut-head",
        "Kubernetes, JSON lines",
        "benign",
        "$L --style fluent --stamp lm-pre -- python train.py --logs json --steps 70 --spike_at 40 | tail -60",
        home="/srv/lm",
    ),
    _entry(
        "json-hanging-judge",
        "JSON lines, gloo loop",
        "remote_service_timeout",
        _SERVICE.format("600 9 hang")
        + "$L --style srun -- python train.py --logs json --steps 40 --timeout 120 "
        + _URL
        + "; kill $p",
    ),
    _entry(
        "srun-german-disk-full",
        "Slurm, gloo loop",
        "storage_fault",
        _GERMAN + "$L --style srun --grace 4 -- python train.py --checkpoint /dev/full --save_every 10",
        culprit=None,
        host="knoten17",
    ),
    _entry(
        "srun-german-missing-folder",
        "Slurm, gloo loop",
        "storage_fault",
        _GERMAN + "mkdir -p run; touch run/data; $L --style srun --grace 4 -- python train.py --shards 20",
        culprit=None,
        also_ok=("config_error", "rank_exception_masked"),
        host="knoten17",
    ),
    _entry(
        "srun-killed-task",
        "Slurm, gloo loop",
        "external_kill",
        "$L --style srun --grace 20 -- python train.py --cpu_seconds 4 --spin_at 12 --log_every 1",
        culprit=(1,),
        also_ok=("os_limits", "host_oom"),
        sufficiency="hint",
    ),
    _entry(
        "srun-cpu-limit",
        "Slurm, gloo loop",
        "os_limits",
        "$L --style srun --grace 20 -- python train.py --cpu_seconds 4 --cpu_grace 60 --spin_at 12 --log_every 1",
        culprit=(1,),
        also_ok=("external_kill",),
    ),
    _entry(
        "srun-clock-set-back",
        "Slurm, gloo loop",
        "benign",
        "$L --style srun -- python train.py --steps 40 --jump_at 17 --save_every 20",
        host="c2-14",
    ),
    _entry(
        "srun-late-task",
        "Slurm, gloo loop",
        "rendezvous_incomplete",
        "$L --style srun -- python train.py --late 110 --timeout 30",
        culprit=(1,),
        also_ok=("slow_rank_preprocess",),
        sufficiency="hint",
        limit_s=200,
    ),
    _entry(
        "mpi-lock-held",
        "MPI, gloo loop",
        "storage_fault",
        'python -c "from filelock import FileLock; import time; '
        "l = FileLock('cache.lock'); l.acquire(); time.sleep(150)\" & "
        "p=$!; sleep 2; $L --style mpi --grace 20 -- python train.py --lock cache.lock --hold_lock 20; kill $p",
        culprit=(0,),
        alt=(("cache.lock",),),
    ),
    _entry(
        "compose-one-folder",
        "docker compose, gloo loop",
        "storage_fault",
        "$L --style compose -- python train.py --claim --steps 300 > $TMPDIR/other.log 2>&1 & p=$!; sleep 30; "
        "$L --style compose --grace 3 -- python train.py --claim --steps 300; kill -TERM $p; wait $p; :",
        culprit=(0,),
        also_ok=("config_error",),
        sufficiency="root",
        home="/workspace",
    ),
    _entry(
        "mpi-other-width",
        "MPI, gloo loop",
        "config_error",
        "$L --style mpi -- python train.py --steps 6 --save_every 5 > /dev/null 2>&1; "
        "$L --style mpi --grace 4 -- python train.py --resume --width 64",
        culprit=None,
        also_ok=("version_mismatch",),
    ),
    _entry(
        "mpi-cut-checkpoint",
        "MPI, gloo loop",
        "storage_fault",
        "$L --style mpi -- python train.py --steps 6 --save_every 5 > /dev/null 2>&1; truncate -s 700000 run/state.pt; "
        "$L --style mpi --grace 4 -- python train.py --resume",
        culprit=None,
        home="/lustre/home/kai/run-12",
    ),
    _entry(
        "srun-time-limit",
        "Slurm, gloo loop",
        "external_kill",
        "timeout -s TERM 100 $L --style srun --stamp 88213 -- python train.py --steps 900; :",
        limit_s=150,
    ),
    _entry(
        "compose-bar-cut",
        "docker compose, gloo loop",
        "benign",
        "timeout -s KILL 100 $L --style compose -- python train.py --bar --quiet_rank --steps 2000 --sleep 0.2 "
        "| head -c 14000",
        home="/workspace",
    ),
]
