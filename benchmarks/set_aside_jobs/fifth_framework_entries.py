"""Jobs of `benchmarks/cases/fifth_set_aside` that ran: Ray, vLLM, TRL, accelerate, DeepSpeed, DCP, RPC, Lockstep."""

from benchmarks.set_aside_jobs.entry import Entry

_PORT = "$((20000 + RANDOM % 9000))"
_COURSE = "cp $S/course_job.py course.py; python course.py "
_JOB = "cp $S/trainers_job.py job.py; "
_RUN = f"torchrun --nproc-per-node {{}} --master-port {_PORT} job.py "
_TINY = (
    "lockstep tiny model --hidden 32 --layers 2 --heads 2 --kv-heads 1 --ffn 64 --max-length 64 --alphabet "
    "0123456789= > /dev/null 2>&1; "
)
_RAY = (
    "cp $S/actors_job.py driver.py; unset TMPDIR; export RAY_raylet_start_wait_time_s=250 RAY_AUTH_MODE=disabled; "
    "timeout -s INT 200 python driver.py "
)
_NANO = (
    "lockstep tiny $PWD/models/nano > /dev/null 2>&1; export VLLM_CPU_KVCACHE_SPACE=1 "
    "VLLM_CPU_OMP_THREADS_BIND=nobind; cp $S/generate_job.py sample.py; "
)
_SERVE = "python -m vllm.entrypoints.openai.api_server --model models/nano --enforce-eager --dtype float32 "
_OWN = "python $S/lockstep_job.py prepare {}; "
_STRIKE = "python $S/lockstep_job.py strike {} & "
_JUDGE = (
    f'export JUDGE_PORT={_PORT}; python -c "import http.server as h, os\nclass H(h.BaseHTTPRequestHandler):\n'
    " def do_POST(s): s.rfile.read(int(s.headers['Content-Length'])); s.send_response(500 if 'call=3' in s.path else "
    "200); s.end_headers(); s.wfile.write(b'{}')\n"
    " def log_message(s, *a): pass\nh.HTTPServer(('127.0.0.1', int(os.environ['JUDGE_PORT'])), H).serve_forever()\" & "
    "j=$!; sleep 2; "
)


def _course(name: str, cls: str, script: str, framework: str = "Python processes", **about: object) -> Entry:
    return Entry(name, framework, cls, _COURSE + script, **{"limit_s": 150, **about})  # type: ignore[arg-type]


def _job(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _JOB + script, **{"limit_s": 240, **about})  # type: ignore[arg-type]


def _ray(name: str, cls: str, script: str, framework: str = "Ray actors", **about: object) -> Entry:
    given = {"venv": "scale", "limit_s": 220, "host": "ray-head", **about}
    return Entry(name, framework, cls, _RAY + script, **given)  # type: ignore[arg-type]


def _vllm(name: str, cls: str, script: str, **about: object) -> Entry:
    given = {"venv": "scale", "limit_s": 300, "host": "infer-2", **about}
    return Entry(name, "vLLM", cls, _NANO + script, **given)  # type: ignore[arg-type]


def _own(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, "Lockstep", cls, script, **{"limit_s": 300, **about})  # type: ignore[arg-type]


ENTRIES = [
    # Processes.
    _course("course-steady", "benign", "course"),
    _course("course-judge-recovers", "benign", "course 500-once"),
    _course("course-slow-reset", "benign", "course slow-reset"),
    _course("checkpoints-watched", "benign", "watched"),
    _course(
        "course-judge-500",
        "remote_service_timeout",
        "course 500",
        culprit=("reward-1",),
        alt=(("127.0.0.1:20419",), ("127.0.0.1",)),
        also_ok=("rank_exception_masked",),
    ),
    _course(
        "course-rollout-killed",
        "external_kill",
        "course kill",
        culprit=("rollout-1",),
        alt=(("532",),),
        also_ok=("host_oom", "rank_exception_masked", "unknown"),
    ),
    _course(
        "course-rollout-stuck",
        "slow_rank_preprocess",
        "course stuck",
        culprit=("rollout-2",),
        also_ok=("unknown", "rank_exception_masked", "remote_service_timeout", "slow_collective_timeout"),
    ),
    _course(
        "conversation-roles",
        "rank_exception_masked",
        "templated roles",
        framework="transformers, jinja",
        also_ok=("config_error",),
    ),
    _course(
        "packing-pool-broken",
        "rank_exception_masked",
        "packed dies",
        also_ok=("external_kill", "host_oom", "unknown"),
        sufficiency="hint",
    ),
    # Ranks of PyTorch.
    _job("join-uneven", "PyTorch DDP (gloo)", "benign", _RUN.format(3) + "uneven"),
    _job("dcp-saved", "PyTorch DCP", "benign", _RUN.format(2) + "saved"),
    _job(
        "dcp-other-width",
        "PyTorch DCP",
        "config_error",
        _RUN.format(2) + "saved wider",
        alt=((0, 1),),
        also_ok=("storage_fault", "rank_exception_masked"),
    ),
    _job(
        "replay-compacted",
        "PyTorch, gloo loop",
        "slow_rank_preprocess",
        _RUN.format(3) + "monitored",
        culprit=(2,),
        also_ok=("unknown", "rank_exception_masked", "slow_collective_timeout", "watchdog_or_heartbeat"),
    ),
    _job("rpc-scored", "PyTorch RPC", "benign", _RUN.format(3) + "called"),
    _job(
        "rpc-score-key",
        "PyTorch RPC",
        "rank_exception_masked",
        _RUN.format(3) + "called key",
        culprit=("scorer2",),
        alt=((2,), (0,)),
    ),
    _job(
        "spawned-reshape",
        "PyTorch, mp.spawn",
        "rank_exception_masked",
        "python job.py spawned",
        culprit=(2,),
        alt=(("process 2",),),
    ),
    _job(
        "model-not-cached",
        "transformers",
        "config_error",
        "export HF_HOME=$TMPDIR/hf; python job.py absent",
        also_ok=("storage_fault", "remote_service_timeout"),
    ),
    # accelerate, DeepSpeed, TRL.
    _job(
        "accelerate-state-partly",
        "accelerate",
        "benign",
        _RUN.format(2) + "accelerated; " + _RUN.format(2) + "accelerated state",
    ),
    _job("accelerate-halving", "accelerate", "benign", "python job.py accelerated halving"),
    _job(
        "accelerate-split",
        "accelerate",
        "config_error",
        _RUN.format(2) + "accelerated split",
        alt=((0, 1),),
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "accelerate-gathers-text",
        "accelerate",
        "rank_divergent_branch",
        _RUN.format(2) + "accelerated metric",
        culprit=(1,),
        alt=((0, 1),),
        also_ok=("rank_exception_masked", "uneven_data"),
    ),
    _job(
        "deep-rank-killed",
        "DeepSpeed",
        "external_kill",
        _RUN.format(2) + "deep kill",
        culprit=(1,),
        also_ok=("host_oom",),
        host="dgx-04",
    ),
    _job(
        "deep-division",
        "DeepSpeed",
        "rank_exception_masked",
        _RUN.format(2) + "deep division",
        culprit=(1,),
        host="dgx-04",
    ),
    _job(
        "deep-batch-skipped",
        "DeepSpeed",
        "rank_divergent_branch",
        _RUN.format(2) + "deep skip",
        culprit=(1,),
        also_ok=("uneven_data",),
        host="dgx-04",
    ),
    _job(
        "deep-tags-differ",
        "DeepSpeed",
        "benign",
        _RUN.format(2) + "deep tag",
        host="dgx-04",
    ),
    _job("deep-steady", "DeepSpeed", "benign", _RUN.format(2) + "deep", host="dgx-04"),
    _job("rloo-steady", "TRL", "benign", _TINY + "python job.py preferences rloo"),
    _job("reward-model-trained", "TRL", "benign", _TINY + "python job.py preferences reward"),
    _job(
        "grpo-judge-500",
        "TRL",
        "remote_service_timeout",
        _TINY + _JUDGE + "python job.py preferences judge; kill $j",
        culprit=("127.0.0.1:21718",),
        alt=(("127.0.0.1",), ("http://127.0.0.1:21718",), ("http://127.0.0.1:21718/judge",)),
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "grpo-server-mode",
        "TRL",
        "version_mismatch",
        _TINY + "python job.py preferences server",
        also_ok=("config_error", "remote_service_timeout"),
    ),
    _job(
        "grpo-groups-of-three",
        "TRL",
        "config_error",
        _TINY + "python job.py preferences groups",
        also_ok=("rank_exception_masked",),
    ),
    # Ray.
    _ray("samplers-steady", "benign", "steady"),
    _ray("samplers-retried", "benign", "retried"),
    _ray(
        "sampler-killed",
        "external_kill",
        "killed",
        culprit=("sampler-2",),
        alt=(("Sampler",), ("17138",)),
        also_ok=("host_oom", "ray_node_or_gcs", "unknown", "rank_exception_masked"),
    ),
    _ray(
        "sampler-crashed",
        "rank_exception_masked",
        "crashed",
        culprit=("sampler-2",),
        alt=(("Sampler",), ("17617",)),
        also_ok=("external_kill", "framework_bug", "unknown", "host_oom", "ray_node_or_gcs"),
        sufficiency="hint",
    ),
    _ray(
        "sampler-hung",
        "unknown",
        "hung",
        culprit=("sampler-1",),
        alt=(("Sampler",),),
        also_ok=("slow_rank_preprocess", "rank_exception_masked", "remote_service_timeout", "slow_collective_timeout"),
        sufficiency="hint",
    ),
    _ray(
        "sampler-temperature",
        "rank_exception_masked",
        "bound",
        culprit=("Sampler",),
        alt=(("sampler-0",), ("18572",)),
        also_ok=("config_error",),
    ),
    _ray("update-no-h100", "ray_resources_pending", "resource", framework="Ray tasks", also_ok=("config_error",)),
    _ray(
        "task-holds-lock",
        "rank_exception_masked",
        "unpicklable",
        framework="Ray tasks",
        also_ok=("config_error", "mp_start_method"),
    ),
    # vLLM.
    _vllm(
        "vllm-chat-refused-once",
        "benign",
        _SERVE + "--port 28913 --max-model-len 128 & v=$!; for i in $(seq 100); do sleep 2; curl -sf "
        "localhost:28913/health && break; done; for p in completions chat/completions completions models; do curl -s "
        '-m 60 localhost:28913/v1/$p -H \'Content-Type: application/json\' -d \'{"model": "models/nano", "prompt": '
        '"1+1=", "messages": [], "max_tokens": 6}\' > /dev/null; done; curl -s localhost:28913/metrics | grep '
        "request_success; kill -INT $v; wait $v; :",
    ),
    _vllm("samples-written", "benign", "python sample.py plain models/nano"),
    _vllm(
        "sampling-engine-killed",
        "vllm_engine_failure",
        "python sample.py killed models/nano",
        culprit=("EngineCore",),
        alt=(("931",),),
        also_ok=("external_kill", "host_oom"),
    ),
    _vllm(
        "chat-no-template",
        "config_error",
        'rm -f models/nano/chat_template.jinja; sed -i \'s/"chat_template"/"old_template"/\' '
        "models/nano/tokenizer_config.json; python sample.py chat models/nano",
        also_ok=("rank_exception_masked",),
    ),
    _vllm(
        "batched-tokens-few",
        "config_error",
        "python sample.py batched models/nano",
        also_ok=("vllm_engine_failure",),
    ),
    # Meant to fail, but this version serves without a tokenizer until it is stopped.
    _vllm(
        "vllm-without-tokenizer",
        "benign",
        "rm models/nano/tokenizer*; " + _SERVE + "--port 28911 --max-model-len 128",
    ),
    # Lockstep.
    _own(
        "own-policy-replaced",
        "benign",
        _OWN.format("recipe=sft steps=40") + _STRIKE.format("policy-0 9 SIGKILL") + "lockstep train run.yaml; wait; :",
    ),
    _own(
        "own-interrupted",
        "external_kill",
        _OWN.format("steps=400") + _STRIKE.format("controller 6 SIGINT") + "lockstep train run.yaml; wait; :",
        also_ok=("benign",),
    ),
    _own(
        "own-model-absent",
        "config_error",
        _OWN.format("recipe=sft steps=10") + "mv model base; lockstep train run.yaml; :",
        also_ok=("storage_fault",),
    ),
]
