"""Healthy jobs that look troubled (scripts/noisy_jobs.py): other counters, other ends, survived errors."""

from benchmarks.job_makers.make_jobs import Job

LOOP, SHELL = "training script", "shell script"


def _noisy(name, what, log="job.log", framework=LOOP, **truth):
    return Job(name, framework, "benign", f"timeout 100 python -X dev noisy_jobs.py {what} > out/{log} 2>&1", **truth)


RUNNING = "timeout 30 python noisy_jobs.py {0} > all.log 2>&1; head -n {1} all.log > out/{2}"
JOBS = (
    _noisy("h-keras", "keras_like", "fit.log"),
    _noisy("h-boosting", "boosting", "xgb.txt"),
    _noisy("h-sweep", "sweep", "study.log", fix="Nothing to fix: some trials diverged, as trials do."),
    _noisy("h-self-check", "self_check", "selftest.out"),
    _noisy("h-heartbeats", "heartbeats", "train.log", fix="Nothing to fix: late heartbeats within the limit."),
    _noisy("h-reconnect", "reconnect", "worker.log", fix="Nothing to fix: the store came up later."),
    _noisy("h-leaked", "leaked", "slurm-7001.out", fix="Nothing to fix: shared memory was cleaned up at the end."),
    _noisy("h-slow-samples", "slow_samples", "judge.log", fix="Nothing to fix: two samples were skipped."),
    _noisy("h-pool-again", "pool_again", "prep.log", fix="Nothing to fix: a worker was lost once and replaced."),
    _noisy("h-never-retrieved", "never_retrieved", "episode.log", fix="Nothing to fix: one background call failed."),
    _noisy("h-checksums", "checksums", "fetch.log", fix="Nothing to fix: two files were fetched again."),
    _noisy("h-words", "words", "classify.log", fix="Nothing to fix: the words are labels."),
    _noisy("h-clock", "clock_only", "out.txt"),
    _noisy(
        "h-fallback",
        "fallback",
        "train.log",
        fix="Nothing to fix: the newest checkpoint was unreadable, the older one served.",
    ),
    _noisy(
        "h-store-retry",
        "store_retry",
        "score.log",
        fix="Nothing to fix: a wait was tried again until the plan was there.",
    ),
    _noisy("h-loader-warning", "loader_warning", "bench.log"),
    _noisy("h-overflow", "overflow", "train.log", fix="Nothing to fix: a loss scale looks for its place."),
    Job(
        "h-idle",
        "inference server",
        "benign",
        RUNNING.format("idle_queue", 27, "serve.log"),
        fix="Nothing to fix: it waits for requests.",
    ),
    Job(
        "h-clock-running",
        LOOP,
        "benign",
        RUNNING.format("clock_only", 34, "stdout.log"),
        fix="Nothing to fix: the job runs.",
    ),
    Job(
        "h-beats-running",
        LOOP,
        "benign",
        RUNNING.format("heartbeats", 22, "train.log"),
        fix="Nothing to fix: the job runs.",
    ),
    Job(
        "h-script-steps",
        SHELL,
        "benign",
        "{ set -x; python -W error::SyntaxWarning noisy_jobs.py checksums; python noisy_jobs.py keras_like; "
        "rm missing-cache-dir || true; kill -0 999999 || echo 'no old run is left'; python noisy_jobs.py words; "
        "echo 'ALL STEPS OK'; } > out/run.sh.log 2>&1",
        fix="Nothing to fix: every step ended well.",
    ),
    Job(
        "h-slurm-epilog",
        LOOP,
        "benign",
        '{ echo "srun: warning: can\'t run 1 processes on 2 nodes, setting nnodes to 1"\n'
        "echo 'WARNING: could not lock /home/user/.cache/huggingface, using it without a lock'\n"
        "python noisy_jobs.py overflow; echo 'slurm_epilog: cleaning /tmp, 0 orphaned processes killed'\n"
        "echo 'JobID=51820 State=COMPLETED ExitCode=0:0 Elapsed=00:14:09'; } > out/slurm-51820.out 2>&1",
        fix="Nothing to fix: completed.",
    ),
)
