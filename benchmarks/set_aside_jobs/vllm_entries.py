"""Jobs of vLLM on CPU: offline generation and servers."""

from benchmarks.set_aside_jobs.entry import Entry

_MODEL = (
    "lockstep tiny $PWD/models/qwen-nano > /dev/null 2>&1; "
    "export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind; "
)
_OFFLINE = _MODEL + "cp $S/vllm_offline.py generate.py; python generate.py models/qwen-nano "
_CLIENT = _MODEL + "cp $S/vllm_client.py client.py; "
_SERVE = (
    "python -m vllm.entrypoints.openai.api_server --model models/qwen-nano --port {port} --max-model-len 128 "
    "--enforce-eager --dtype float32 "
)


def _entry(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, "vLLM", cls, script, venv="scale", limit_s=540, **about)  # type: ignore[arg-type]


def _served(port: int, client: str, stop: str = "kill -TERM $v; wait $v", serve: str = "") -> str:
    return (
        _CLIENT
        + _SERVE.format(port=port)
        + serve
        + f" & v=$!; python client.py --port {port} --kill $v {client}; {stop}; :"
    )


ENTRIES = [
    _entry("vllm-offline", "benign", _OFFLINE + "--prompts 48"),
    _entry("vllm-server-stopped", "benign", _served(28131, "--requests 8 > $OUT/client.log 2>&1"), host="infer-2"),
    _entry("vllm-server-refuses-long", "benign", _served(28132, "--requests 12 --long_every 4"), host="infer-2"),
    _entry(
        "vllm-client-waits-for-start",
        "benign",
        _served(28133, "--requests 10", serve="> $OUT/server.log 2>&1"),
        host="infer-2",
    ),
    _entry(
        "vllm-no-such-model",
        "config_error",
        _OFFLINE.replace("generate.py models/qwen-nano", "generate.py models/qwen-nano-v2"),
        also_ok=("storage_fault", "remote_service_timeout", "vllm_engine_failure"),
    ),
    _entry(
        "vllm-port-taken",
        "port_in_use",
        _MODEL + "python -m http.server 28134 > /dev/null 2>&1 & h=$!; " + _SERVE.format(port=28134) + "; kill $h",
        host="infer-5",
    ),
    _entry(
        "vllm-client-impatient",
        "remote_service_timeout",
        _served(28135, "--requests 9 --wait 200"),
        also_ok=("vllm_engine_failure", "slow_rank_preprocess"),
        host="infer-5",
    ),
    _entry(
        "vllm-engine-killed",
        "vllm_engine_failure",
        _served(28135, "--requests 9 --kill_at 4 --timeout 40"),
        also_ok=("external_kill", "host_oom"),
        host="infer-5",
    ),
    _entry(
        "vllm-engine-frozen",
        "vllm_engine_failure",
        _served(28136, "--requests 9 --freeze_at 3 --timeout 25", stop="kill -9 $v $(pgrep -P $v); wait $v"),
        also_ok=("remote_service_timeout",),
        sufficiency="hint",
    ),
    _entry("vllm-prompts-too-long", "config_error", _OFFLINE + "--repeat 40", home="/home/pia/gen"),
    _entry(
        "vllm-cache-too-small",
        "config_error",
        _OFFLINE.replace("qwen-nano >", "qwen-nano --max-length 3000000 >") + "--engine '{\"max_model_len\": 3000000}'",
        also_ok=("vllm_engine_failure",),
    ),
    _entry("vllm-foreign-tokens", "config_error", _OFFLINE + "--ids 12 14 151643 9", also_ok=("version_mismatch",)),
    _entry(
        "vllm-tensor-parallel",
        "config_error",
        _OFFLINE + "--engine '{\"tensor_parallel_size\": 3}'",
        also_ok=("vllm_engine_failure",),
    ),
    _entry(
        "vllm-shard-cut",
        "storage_fault",
        _OFFLINE.replace("cp $S", "truncate -s 100000 models/qwen-nano/model.safetensors; cp $S"),
        also_ok=("vllm_engine_failure",),
    ),
]
