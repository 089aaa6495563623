"""Jobs of `benchmarks/cases/third_set_aside`: gloo ranks of one script, and programs beside a training."""

from benchmarks.set_aside_jobs.entry import Entry

_TEAM = 'cp $S/team_job.py distill.py; cp $S/launch.py $TMPDIR; L="python $TMPDIR/launch.py"; '
_RUN = "torchrun --nproc-per-node 2 --master-port $((20000 + RANDOM % 9000)) distill.py "
_SIDE = "cp $S/side_job.py tools.py; {}python tools.py "
_JOURNAL = ' 2>&1 | while IFS= read -r l; do echo "$(date "+%b %d %T") rack4-n2 distill[4117]: $l"; done'
_FILES = (
    "export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 9000)) WORLD_SIZE=2; for r in 0 1; do "
    "RANK=$r python distill.py {} > $OUT/worker_$r.out 2>&1 & done; "
)
_BOTH = ((0,), (0, 1))


def _team(name: str, cls: str, script: str, framework: str = "PyTorch, gloo loop", **about: object) -> Entry:
    return Entry(name, framework, cls, _TEAM + script, limit_s=240, **about)  # type: ignore[arg-type]


def _side(name: str, framework: str, cls: str, script: str, before: str = "", **about: object) -> Entry:
    return Entry(name, framework, cls, _SIDE.format(before) + script, limit_s=240, **about)  # type: ignore[arg-type]


ENTRIES = [
    # Healthy ranks.
    _team("distill-noise", "benign", _RUN + "--noise --save student.pt", home="/home/lena/distill"),
    _team("distill-journal", "benign", _RUN + "--noise --form short --steps 24" + _JOURNAL, host="rack4-n2"),
    _team("distill-json-files", "benign", _FILES.format("--form json --noise --save student.pt") + "wait"),
    _team(
        "distill-continued",
        "benign",
        _RUN + "--steps 9 --save a.pt; " + _RUN + "--load a.pt --save b.pt --steps 15 --form rank",
        home="/mnt/work/kd",
    ),
    _team(
        "distill-slow-rank-ends-well",
        "benign",
        "$L --style swarm -- python distill.py --fault slow --seconds 14 --form rank --steps 24",
    ),
    # Ranks that fail, wait or leave.
    _team(
        "distill-length-reward",
        "rank_exception_masked",
        _RUN + "--fault length-reward --form rank",
        culprit=(1,),
    ),
    _team(
        "distill-nested-answer",
        "rank_exception_masked",
        "$L --style compose --grace 3 -- python distill.py --fault nested-answer --on 0",
        culprit=(0,),
        home="/workspace",
    ),
    _team(
        "distill-array",
        "host_oom",
        _FILES.format("--fault array --form json") + "wait",
        culprit=(1,),
        also_ok=("config_error", "rank_exception_masked"),
    ),
    _team(
        "distill-address-limit",
        "host_oom",
        "ulimit -v 9000000; " + _RUN + "--fault tensor --rows 900000 --form short",
        culprit=(1,),
        also_ok=("os_limits",),
    ),
    _team(
        "distill-regex",
        "slow_rank_preprocess",
        "timeout -k 2 90 $L --style srun --grace 6 -- python distill.py --fault regex --timeout 15",
        culprit=(1,),
        also_ok=("unknown", "rank_exception_masked", "external_kill", "watchdog_or_heartbeat"),
        sufficiency="hint",
    ),
    _team(
        "distill-monitored-read",
        "remote_service_timeout",
        "$L --style kubectl --grace 4 -- python distill.py --fault read --monitored --timeout 15",
        culprit=(1,),
        also_ok=(
            "unknown",
            "slow_rank_preprocess",
            "rank_exception_masked",
            "slow_collective_timeout",
            "watchdog_or_heartbeat",
        ),
        sufficiency="hint",
        home="/app",
    ),
    _team(
        "distill-lock",
        "rank_exception_masked",
        "timeout -k 2 100 $L --style mpi --grace 6 -- python distill.py --fault lock --timeout 30",
        culprit=(1,),
        also_ok=("unknown", "slow_rank_preprocess", "framework_bug", "watchdog_or_heartbeat"),
        sufficiency="hint",
    ),
    _team(
        "distill-leaves",
        "uneven_data",
        "timeout -k 2 90 $L --style srun -- python distill.py --fault leave",
        culprit=(1,),
        also_ok=("rank_divergent_branch",),
    ),
    _team(
        "distill-import-first",
        "version_mismatch",
        "$L --style srun --grace 4 -- python distill.py --fault import-first",
        culprit=(1,),
        also_ok=("config_error", "rank_exception_masked"),
    ),
    _team(
        "distill-abort",
        "rank_exception_masked",
        _RUN + "--fault abort --form rank",
        culprit=(1,),
        also_ok=("external_kill", "unknown", "framework_bug"),
        sufficiency="hint",
    ),
    _team(
        "distill-stopped",
        "unknown",
        _FILES.format("--fault stop --on 0 --timeout 18 --form rank")
        + "exec 2> /dev/null; sleep 75; for p in $(jobs -p); do kill -9 $p; done; wait",
        culprit=(0,),
        also_ok=("slow_rank_preprocess", "external_kill", "watchdog_or_heartbeat", "rank_exception_masked"),
        sufficiency="hint",
    ),
    _team(
        "distill-detail-shape",
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL; " + _RUN + "--fault shape --form short",
        culprit=(1,),
        alt=_BOTH,
    ),
    _team(
        "distill-detail-call",
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL; $L --style fluent --stamp kd --grace 4 -- python distill.py "
        "--fault other-call --form json",
        culprit=(1,),
        alt=_BOTH,
        home="/app",
    ),
    _team(
        "distill-skips",
        "rank_divergent_branch",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL; " + _FILES.format("--fault skip --on 0 --form rank") + "wait",
        culprit=(0,),
        alt=((1,), (0, 1)),
        also_ok=("uneven_data",),
    ),
    _team(
        "distill-slow-rank",
        "slow_rank_preprocess",
        _RUN + "--fault slow --seconds 60 --timeout 15 --form rank",
        culprit=(1,),
        also_ok=("unknown", "rank_exception_masked", "slow_collective_timeout"),
        sufficiency="hint",
    ),
    _team("distill-open-files", "os_limits", _RUN + "--fault open-files --form json", culprit=(1,)),
    _team(
        "distill-file-size",
        "os_limits",
        "ulimit -f 20000; " + _RUN + "--fault huge-file --form rank",
        culprit=(1,),
        also_ok=("storage_fault",),
    ),
    _team(
        "distill-links",
        "storage_fault",
        "$L --style compose --grace 3 -- python distill.py --fault links",
        culprit=(1,),
        also_ok=("config_error", "rank_exception_masked"),
        home="/workspace",
    ),
    _team(
        "distill-name",
        "storage_fault",
        _RUN + "--fault name --form short" + _JOURNAL,
        culprit=(1,),
        host="rack4-n2",
        also_ok=("config_error", "rank_exception_masked", "os_limits"),
    ),
    _team("distill-norm", "nan_or_inf", _RUN + "--fault norm --form rank"),
    _team("distill-sample", "nan_or_inf", "$L --style srun --grace 3 -- python distill.py --fault sample --form short"),
    _team(
        "distill-nan",
        "nan_or_inf",
        "$L --style kubectl -- python distill.py --fault nan-teacher --form json",
        home="/app",
    ),
    _team("distill-cuda", "version_mismatch", _RUN + "--device cuda:0", also_ok=("config_error", "gpu_binding")),
    _team(
        "distill-vocab",
        "config_error",
        _RUN + "--vocab 320 --form rank",
        also_ok=("rank_exception_masked", "version_mismatch"),
    ),
    _team(
        "distill-narrower",
        "config_error",
        _RUN + "--steps 3 --save a.pt > /dev/null 2>&1; " + _RUN + "--load a.pt --width 32",
        also_ok=("version_mismatch", "rank_exception_masked"),
    ),
    _team(
        "distill-empty-checkpoint",
        "storage_fault",
        ": > a.pt; " + _RUN + "--load a.pt --form short",
        also_ok=("rank_exception_masked",),
    ),
    _team(
        "distill-preempted",
        "external_kill",
        "timeout -s TERM 75 $L --style srun --stamp 90114 -- python distill.py --save_on_term --steps 900; :",
        also_ok=("benign",),
    ),
    _team(
        "distill-killed-task",
        "external_kill",
        "$L --style swarm --signal 0:70:SIGKILL -- python distill.py --form json --steps 900 --timeout 20",
        culprit=(0,),
        also_ok=("host_oom",),
        sufficiency="hint",
    ),
    _team(
        "distill-head-silent",
        "master_unreachable",
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=198.51.100.7 MASTER_PORT=29511 python distill.py --timeout 20 --form rank",
        also_ok=("network_blocked", "rendezvous_incomplete", "port_in_use", "config_error"),
    ),
    # Programs beside the training.
    _side(
        "datasets-worker-gone",
        "datasets",
        "external_kill",
        "map_rows",
        before="KILL_AT=1 ",
        also_ok=("host_oom", "rank_exception_masked"),
        sufficiency="hint",
    ),
    _side("verifier-pool", "Python processes", "benign", "verifier_pool"),
    _side("agents-tools", "Python processes", "benign", "agents", home="/srv/agents"),
    _side(
        "pool-in-pool",
        "Python processes",
        "mp_start_method",
        "daemon_children",
        also_ok=("rank_exception_masked",),
    ),
    _side("second-context", "Python processes", "mp_start_method", "second_context", also_ok=("config_error",)),
    _side(
        "experience-locked",
        "Python processes",
        "storage_fault",
        "experience",
        also_ok=("rank_exception_masked",),
    ),
    _side("weights-pointer", "safetensors", "storage_fault", "pointer"),
    _side("accelerate-required", "transformers", "version_mismatch", "required"),
    _side("extension-symbol", "PyTorch extension", "version_mismatch", "symbol"),
    _side(
        "scores-refused",
        "FastAPI, Python processes",
        "remote_service_timeout",
        "serve 28611 > $OUT/server.log 2>&1 & p=$!; sleep 20; "
        "(sleep 6; kill -9 $p) & python tools.py rollouts http://127.0.0.1:28611/score 90",
        also_ok=("external_kill",),
    ),
    _side(
        "scores-unresolved",
        "Python processes",
        "remote_service_timeout",
        "rollouts http://reward-svc.rlhf.svc.cluster.local:8080/score",
        also_ok=("config_error", "master_unreachable"),
    ),
    _side(
        "scores-port",
        "FastAPI",
        "port_in_use",
        "serve 28612 > /dev/null 2>&1 & p=$!; sleep 20; python tools.py serve 28612; kill $p",
    ),
    _side(
        "liveness-probe",
        "Kubernetes, FastAPI",
        "remote_service_timeout",
        "serve 28613 4 & p=$!; sleep 12; (python tools.py rollouts http://127.0.0.1:28613/score 20 > $OUT/trainer.log "
        "2>&1 &) ; python tools.py probe 28613 $p; wait $p; sleep 8; :",
        also_ok=("external_kill",),
        home="/app",
    ),
    _side(
        "scores-served",
        "FastAPI",
        "benign",
        "serve 28614 & p=$!; sleep 15; python tools.py rollouts http://127.0.0.1:28614/score 12; kill -INT $p; wait $p",
        home="/app",
    ),
    _side(
        "index-group-limit",
        "Python processes",
        "host_oom",
        "verifier_pool > /dev/null 2>&1; g=/sys/fs/cgroup/memory/kd$$; mkdir $g; echo 400M > $g/memory.limit_in_bytes; "
        'bash -c "echo \\$\\$ > $g/cgroup.procs; exec python tools.py memory 900" & wait $!; '
        'echo "index.sh: exit status $?"; cat $g/memory.oom_control; sleep 1; rmdir $g',
        also_ok=("external_kill",),
        sufficiency="hint",
    ),
    _side(
        "queue-space",
        "PyTorch, processes",
        "shm_too_small",
        "verifier_pool > /dev/null 2>&1; unshare -m bash -c 'mount -t tmpfs -o size=24m tmpfs /dev/shm; "
        "python tools.py queue_space'",
        also_ok=("storage_fault",),
    ),
    _side(
        "loader-timeout",
        "PyTorch data loader",
        "slow_rank_preprocess",
        "loader",
        also_ok=("rank_exception_masked", "storage_fault", "unknown"),
    ),
    _side(
        "spawned-killed",
        "PyTorch, mp.spawn",
        "external_kill",
        "spawned",
        culprit=(1,),
        also_ok=("host_oom",),
        sufficiency="hint",
    ),
    _side(
        "rpc-one-absent",
        "PyTorch RPC",
        "rendezvous_incomplete",
        "remote 0 & timeout -k 2 150 python tools.py remote 2; wait",
        culprit=("trainer1",),
        alt=((1,),),
        also_ok=("master_unreachable", "slow_rank_preprocess"),
        sufficiency="hint",
    ),
]
