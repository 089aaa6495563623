"""Jobs around training (data, evaluation, serving), and loops that survive trouble or do not."""

from benchmarks.job_makers.make_jobs import Job

LOOP, DATA, SERVE, POOL = "hand-written loop (gloo)", "data preparation", "uvicorn service", "multiprocessing"
RUN = "torchrun --standalone --nproc-per-node"


def _loop(name, cls, what, culprit=None, *, ranks=2, log="out/train.log", before="", **truth):
    script = f"{before}\n{RUN} {ranks} survivor.py {what} > {log} 2>&1"
    return Job(name, LOOP, cls, script, culprit, **truth)


def _data(name, cls, what, culprit=None, *, before="", after="", framework=DATA, log="job.log", **truth):
    script = f"{before}\ntimeout 100 python data_jobs.py {what} > out/{log} 2>&1\n{after}"
    return Job(name, framework, cls, script, culprit, **truth)


SMALL = "mkdir ckpt; mount -t tmpfs -o size=4m none ckpt"
SERVING = "python serve_app.py serve $PORT > out/server.log 2>&1 & sleep 6; python serve_app.py ask $PORT 40\n"
JOBS = (
    _loop("h-nan-skipped", "benign", "nan_batch", fix="Nothing to fix: two batches were skipped by all ranks."),
    _loop("h-bad-record", "benign", "bad_record", fix="Nothing to fix: a read failed once, a copy was used."),
    _loop("h-slow-disk", "benign", "slow_disk", ranks=3, fix="Nothing to fix: one slow read within the limit."),
    _loop("h-warnings", "benign", "warnings", fix="Nothing to fix: warnings only."),
    _loop("h-exit-zero", "benign", "at_exit", ranks=3, fix="Nothing to fix: SystemExit 0."),
    _loop(
        "h-requeue",
        "benign",
        "requeue 900",
        before="hit SIGUSR1 0 out/train.log '\\[0\\] 28/'",
        also=("external_kill",),
        fix="Nothing to fix: the job saved and left before its time limit, it will be requeued.",
    ),
    Job(
        "h-two-tries",
        LOOP,
        "benign",
        'for try in 1 2; do echo "== attempt $try ==" >> out/run.log\n'
        f"ADDR=x; if [ $try = 1 ]; then timeout 60 {RUN} 2 survivor.py lost_mount >> out/run.log 2>&1\n"
        f'else {RUN} 2 survivor.py plain >> out/run.log 2>&1; fi; echo "exit status $?" >> out/run.log; done',
        fix="Nothing to fix: the second attempt ended well.",
    ),
    Job(
        "h-labelled-words",
        LOOP,
        "benign",
        "FILE=out/merged.txt; labelled '1: [default%d]:' 2 survivor.py nan_batch 30; finish",
        fix="Nothing to fix: two batches were skipped by all ranks.",
    ),
    Job(
        "h-detail",
        LOOP,
        "benign",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO; plain 2 survivor.py plain 20; finish",
        fix="Nothing to fix: much debug output.",
    ),
    _data("h-prepare", "benign", "prepare", fix="Nothing to fix: one file was skipped."),
    _data("h-evaluate", "benign", "evaluate", log="eval.jsonl"),
    _data("h-transcribe", "benign", "transcribe", log="wer.txt"),
    _data(
        "h-download",
        "benign",
        "download 8 any",
        before="python3 judge_server.py $PORT2 flaky > /dev/null 2>&1 & J=$!; sleep 1",
        after="kill $J",
        fix="Nothing to fix: slow and refused answers were asked for again.",
    ),
    _data(
        "download-timeout",
        "remote_service_timeout",
        "download",
        before="python3 judge_server.py $PORT2 flaky > /dev/null 2>&1 & J=$!; sleep 1",
        after="kill $J",
        fix="The server answered too slowly once, and this request is not asked again.",
    ),
    _data(
        "h-download-late",
        "benign",
        "download",
        before="python3 judge_server.py $PORT2 late:4 > /dev/null 2>&1 & J=$!",
        after="kill $J",
        fix="Nothing to fix: the server came up later.",
    ),
    _data(
        "h-rollouts",
        "benign",
        "rollouts",
        framework="asyncio sampler",
        fix="Nothing to fix: tasks were cancelled on purpose.",
    ),
    _data(
        "h-queue-worker",
        "benign",
        "queue_worker",
        before="hit SIGTERM self:queue_worker out/job.log 'batch 40:'",
        also=("external_kill",),
        framework="scoring worker",
        fix="Nothing to fix: the worker ended well when asked to.",
    ),
    _data(
        "h-save-again",
        "benign",
        "save_again",
        before=SMALL,
        after="umount ckpt",
        fix="Nothing to fix: old checkpoints made room.",
    ),
    Job("h-serve-interrupt", SERVE, "benign", SERVING + "kill -INT %1; wait", fix="Nothing to fix: ended by Ctrl-C."),
    Job("h-serve-terminate", SERVE, "benign", SERVING + "kill -TERM %1; wait", fix="Nothing to fix: ended on purpose."),
    Job(
        "h-serve-running",
        SERVE,
        "benign",
        SERVING + "cp out/server.log keep; kill %1; wait; cp keep out/server.log",
        fix="Nothing to fix: it serves.",
    ),
    Job(
        "serve-port",
        SERVE,
        "port_in_use",
        "python3 -m http.server $PORT --bind 127.0.0.1 > /dev/null 2>&1 & sleep 1\n"
        "timeout 60 python serve_app.py serve $PORT > out/server.log 2>&1; kill %1",
        fix="The port is taken by another process.",
    ),
    _loop(
        "lost-mount",
        "storage_fault",
        "lost_mount",
        (1,),
        ranks=3,
        also=("rank_exception_masked",),
        fix="Rank 1 cannot read its shard (input/output error).",
    ),
    _loop(
        "wrong-order",
        "rank_divergent_branch",
        "wrong_order",
        before="export TORCH_DISTRIBUTED_DEBUG=DETAIL",
        also=("framework_bug",),
        fix="Rank 0 and the others call broadcast and all-reduce in another order.",
    ),
    _loop(
        "recv-cycle",
        "rank_divergent_branch",
        "recv_cycle",
        ranks=3,
        also=("framework_bug", "config_error"),
        sufficiency="hint",
        fix="All ranks receive first: a cycle.",
    ),
    _loop(
        "stuck-accept",
        "rank_exception_masked",
        "stacks",
        (2,),
        ranks=3,
        also=("remote_service_timeout", "slow_rank_preprocess", "rank_divergent_branch", "unknown"),
        fix="Rank 2 waits in accept() for a peer that never comes.",
    ),
    _loop("class-outside", "rank_exception_masked", "assertion", (3,), ranks=4, fix="A class of rank 3 is too large."),
    Job(
        "left-early",
        LOOP,
        "uneven_data",
        "plain 3 survivor.py early_exit; finish",
        (1,),
        also=("rank_divergent_branch", "rank_exception_masked"),
        fix="Rank 1 leaves with status 0 before the others are done.",
    ),
    _loop(
        "no-nccl",
        "config_error",
        "nccl",
        also=("version_mismatch",),
        fix="This build of torch has no NCCL; use gloo or a CUDA build.",
    ),
    _loop(
        "no-cuda",
        "version_mismatch",
        "cuda",
        also=("config_error", "gpu_binding"),
        fix="torch was built without CUDA.",
    ),
    _data("fill-disk", "storage_fault", "fill_disk", before=SMALL, after="umount ckpt", fix="The disk is full."),
    _data(
        "read-only",
        "storage_fault",
        "read_only",
        before="mkdir ckpt; mount -t tmpfs -o ro,size=1m none ckpt",
        after="umount ckpt",
        fix="The folder is read-only.",
    ),
    _data(
        "native-crash",
        "rank_exception_masked",
        "segfault",
        also=("framework_bug", "unknown"),
        fix="A native library crashed.",
    ),
    _data(
        "no-package",
        "version_mismatch",
        "needs_package",
        also=("config_error", "rank_exception_masked"),
        fix="A package is not installed.",
    ),
    _data(
        "old-package",
        "version_mismatch",
        "old_package",
        before="mkdir -p shim/datasets-2.14.0.dist-info\n"
        "printf 'Metadata-Version: 2.1\\nName: datasets\\nVersion: 2.14.0\\n' > "
        "shim/datasets-2.14.0.dist-info/METADATA\n"
        "export PYTHONPATH=$PWD/shim",
        fix="datasets is too old.",
    ),
    _data(
        "spawn-handle",
        "mp_start_method",
        "unpicklable",
        framework=POOL,
        also=("rank_exception_masked",),
        fix="An open file cannot be pickled for a spawned worker.",
    ),
    _data(
        "spawn-no-guard",
        "mp_start_method",
        "no_guard",
        framework=POOL,
        also=("rank_exception_masked",),
        fix="The program starts processes while it is imported; guard it with __main__.",
    ),
    _data(
        "pool-killed",
        "host_oom",
        "dead_worker",
        framework=POOL,
        also=("external_kill", "unknown", "rank_exception_masked"),
        sufficiency="hint",
        fix="A worker of the pool was killed.",
    ),
    _data(
        "collator-died",
        "rank_exception_masked",
        "deadlock",
        framework=POOL,
        fix="The collator raised, the main process waits for it.",
    ),
    _data(
        "download-refused",
        "remote_service_timeout",
        "download 4",
        also=("master_unreachable",),
        fix="Nothing listens where the data should come from.",
    ),
)
