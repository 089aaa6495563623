"""Jobs of `benchmarks/cases/third_set_aside`: transformers, accelerate, DeepSpeed, FSDP2, Ray, vLLM and Lockstep."""

from benchmarks.set_aside_jobs.entry import Entry

_JOB = "cp $S/framework_job.py job.py; cp $S/launch.py $TMPDIR; "
_RUN = "torchrun --nproc-per-node 2 --master-port $((20000 + RANDOM % 9000)) job.py "
_ACCELERATE = "accelerate launch --cpu --num_processes 2 --main_process_port $((20000 + RANDOM % 9000)) job.py "
_RAY = (
    "cp $S/cluster_job.py driver.py; unset TMPDIR; export RAY_raylet_start_wait_time_s=150 RAY_AUTH_MODE=disabled; "
    "timeout -s INT 200 python driver.py "
)
_NANO = (
    "lockstep tiny $PWD/models/nano > /dev/null 2>&1; "
    "export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind; "
)
_SERVER = "python -m vllm.entrypoints.openai."
_VLLM = _SERVER + "api_server --model models/nano --max-model-len 128 --enforce-eager --dtype float32 "
_BATCH = (
    'for i in 1 2 3 4; do echo \'{"custom_id": "row-\'$i\'", "method": "POST", "url": "/v1/completions", "body": '
    '{"model": "models/nano", "prompt": "\'$i\'+2=", "max_tokens": \'$((i == 3 ? 4000 : 8))\'}}\'; done > in.jsonl; '
)
_PROJECT = "python $S/lockstep_job.py prepare steps={steps} reward={reward} recipe={recipe}; "


def _job(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _JOB + script, limit_s=240, **about)  # type: ignore[arg-type]


def _ray(name: str, framework: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, framework, cls, _RAY + script, venv="scale", limit_s=260, **about)  # type: ignore[arg-type]


def _vllm(name: str, cls: str, script: str, **about: object) -> Entry:
    return Entry(name, "vLLM", cls, _NANO + script, venv="scale", limit_s=400, **about)  # type: ignore[arg-type]


def _own(
    name: str, cls: str, change: str = ":", steps: int = 10, reward: str = "first_digit", recipe: str = "grpo",
    then: str = "", run: str = "lockstep train run.yaml", **about: object,
) -> Entry:  # fmt: skip
    """A run of `lockstep train`: the project, a change of it, the run, and what comes after."""
    project = _PROJECT.format(steps=steps, reward=reward, recipe=recipe)
    script = f"{project}{change}; {run}; {then or ':'}"
    return Entry(name, "Lockstep", cls, script, limit_s=300, **about)  # type: ignore[arg-type]


_PAIRS = (
    "python -c \"import json; rows = [json.loads(x) for x in open('data/train.jsonl')]; "
    "print('\\n'.join(json.dumps({'prompt': x['prompt'], 'chosen': x['answer'], 'rejected': '9'}) for x in rows))\" "
    "> data/pairs.jsonl; sed -i 's/^recipe: sft/recipe: preference/; s/train.jsonl/pairs.jsonl/' run.yaml; "
    "echo 'loss: {type: sigmoid, beta: 0.1}' >> run.yaml"
)

ENTRIES = [
    # transformers, peft, accelerate.
    _job(
        "trainer-torchrun",
        "transformers",
        "benign",
        _RUN + "trainer --evaluate --save 20 --no_bar --fault probe",
        home="/home/lena/tone",
    ),
    _job("trainer-only-evaluates", "transformers", "benign", "python job.py trainer --only_evaluate"),
    _job(
        "trainer-unknown-label",
        "transformers",
        "rank_exception_masked",
        "python job.py trainer --fault label --no_bar",
        also_ok=("config_error", "storage_fault"),
    ),
    _job(
        "trainer-best-metric",
        "transformers",
        "config_error",
        "python job.py trainer --evaluate --best --save 10 --no_bar",
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "trainer-callback",
        "transformers",
        "rank_exception_masked",
        "python $TMPDIR/launch.py --style compose --grace 3 -- python job.py trainer --fault callback --no_bar",
        alt=((0, 1),),
        home="/workspace",
    ),
    _job(
        "trainer-checkpoint-gone",
        "transformers",
        "storage_fault",
        "python job.py trainer --resume tone/checkpoint-400",
        also_ok=("config_error",),
    ),
    _job("tokenizer-padding", "transformers", "config_error", "python job.py pad", also_ok=("rank_exception_masked",)),
    _job("config-cut", "transformers", "storage_fault", "python job.py cut_index", also_ok=("config_error",)),
    _job("model-type-newer", "transformers", "version_mismatch", "python job.py newer_type", also_ok=("config_error",)),
    _job(
        "adapter-wider",
        "transformers, peft",
        "config_error",
        "python job.py adapter",
        also_ok=("version_mismatch", "rank_exception_masked"),
    ),
    _job("accelerate-epochs", "accelerate", "benign", _ACCELERATE + "accelerated", home="/data/users/omar/acc"),
    _job(
        "accelerate-restored",
        "accelerate",
        "benign",
        _ACCELERATE + "accelerated --epochs 1; " + _ACCELERATE + "accelerated --epochs 2 --resume state",
    ),
    _job(
        "accelerate-tracker",
        "accelerate",
        "rank_exception_masked",
        "export JOB_FAULT=tracker; " + _RUN + "accelerated",
        culprit=(0,),
        also_ok=("config_error", "remote_service_timeout"),
    ),
    _job(
        "accelerate-debug-shapes",
        "accelerate",
        "rank_divergent_branch",
        "export ACCELERATE_DEBUG_MODE=1 JOB_FAULT=shape; " + _RUN + "accelerated",
        alt=((0, 1),),
        also_ok=("config_error",),
    ),
    # DeepSpeed, FSDP2.
    _job("zero-saved", "DeepSpeed", "benign", _RUN + "zero --save 1", host="dgx-11"),
    _job(
        "zero-optimizer-name",
        "DeepSpeed",
        "config_error",
        _RUN + 'zero --settings \'{"optimizer": {"type": "AdamW8bits", "params": {"lr": 0.1}}}\'',
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "zero-stage-five",
        "DeepSpeed",
        "config_error",
        _RUN + 'zero --settings \'{"zero_optimization": {"stage": 5}}\'',
    ),
    _job(
        "zero-checkpoint-cut",
        "DeepSpeed",
        "storage_fault",
        _RUN
        + "zero --save 1 > /dev/null 2>&1; for f in zero-ckpt/*/*optim_states.pt; do truncate -s 900 $f; done; "
        + _RUN
        + "zero --resume zero-ckpt",
        also_ok=("rank_exception_masked",),
    ),
    _job(
        "sharded-resumed",
        "PyTorch FSDP2",
        "benign",
        _RUN + "sharded --save 10 --steps 20; " + _RUN + "sharded --resume dcp/20 --steps 12",
    ),
    _job(
        "sharded-columns",
        "PyTorch FSDP2",
        "rank_exception_masked",
        "torchrun --nproc-per-node 2 --master-port $((20000 + RANDOM % 9000)) --redirects 3 --log-dir $OUT/ranks "
        "job.py sharded --fault columns",
        culprit=(1,),
        also_ok=("storage_fault", "config_error", "uneven_data"),
    ),
    _job(
        "sharded-other-width",
        "PyTorch FSDP2",
        "config_error",
        _RUN + "sharded --save 10 --steps 10 > /dev/null 2>&1; " + _RUN + "sharded --resume dcp/10 --width 48",
        also_ok=("version_mismatch", "rank_exception_masked"),
    ),
    _job(
        "sharded-part-absent",
        "PyTorch FSDP2",
        "storage_fault",
        _RUN
        + "sharded --save 10 --steps 10 > /dev/null 2>&1; rm dcp/10/__1_0.distcp; "
        + _RUN
        + "sharded --resume dcp/10",
        also_ok=("rank_exception_masked",),
    ),
    # Ray.
    _ray("players-flaky", "Ray actors", "benign", "healthy", host="head-0"),
    _ray("players-zero", "Ray actors", "rank_exception_masked", "zero", host="head-0"),
    _ray(
        "players-hang",
        "Ray actors",
        "unknown",
        "hang",
        host="head-0",
        also_ok=(
            "slow_collective_timeout",
            "slow_rank_preprocess",
            "ray_node_or_gcs",
            "rank_exception_masked",
            "remote_service_timeout",
        ),
        sufficiency="hint",
    ),
    _ray("tasks-environment", "Ray tasks", "config_error", "environment", also_ok=("storage_fault",)),
    _ray("asha-stops", "Ray Tune", "benign", "tune"),
    # Meant to fail its health checks, but the environment lacks a library of Ray Serve.
    _ray(
        "serve-extras-absent",
        "Ray Serve",
        "version_mismatch",
        "serve",
        also_ok=("config_error", "rank_exception_masked"),
    ),
    _ray("client-port", "Ray client", "ray_node_or_gcs", "client", also_ok=("master_unreachable",)),
    _ray("bundles-spread", "Ray placement groups", "ray_resources_pending", "reserve"),
    # vLLM.
    # Meant to be healthy, but batches have no plain completions.
    _vllm(
        "batch-file",
        "config_error",
        _BATCH + _SERVER + "run_batch -i in.jsonl -o out.jsonl --model models/nano --max-model-len "
        "128 --enforce-eager --dtype float32; cat out.jsonl",
        also_ok=("rank_exception_masked",),
    ),
    _vllm(
        "serve-architecture",
        "version_mismatch",
        'sed -i \'s/Qwen[0-9A-Za-z]*ForCausalLM/Qwen6MoeForCausalLM/; s/"model_type": "[a-z0-9_]*"/"model_type": '
        '"qwen6_moe"/\' models/nano/config.json; ' + _VLLM + "--port 28701",
        also_ok=("config_error", "vllm_engine_failure"),
    ),
    _vllm("serve-option", "config_error", _VLLM + "--port 28702 --max-modellen 4096"),
    _vllm(
        "serve-cache-space",
        "host_oom",
        "export VLLM_CPU_KVCACHE_SPACE=4000; " + _VLLM + "--port 28703",
        also_ok=("config_error", "vllm_engine_failure"),
    ),
    _vllm(
        "serve-interrupted",
        "benign",
        _VLLM + "--port 28704 & v=$!; for i in $(seq 120); do sleep 2; curl -sf localhost:28704/health && break; done; "
        "for i in 1 2 3; do curl -s localhost:28704/v1/completions -H 'Content-Type: application/json' -d "
        '\'{"model": "models/nano", "prompt": "1+1=", "max_tokens": 8}\' > /dev/null; done; curl -s '
        "localhost:28704/v1/completions -H 'Content-Type: application/json' -d '{\"model\": \"other\"}' > /dev/null; "
        "kill -INT $v; wait $v; :",
        host="infer-2",
    ),
    _vllm(
        "serve-tokenizer-gone",
        "storage_fault",
        "rm models/nano/tokenizer*; " + _VLLM + "--port 28705",
        also_ok=("config_error", "vllm_engine_failure", "version_mismatch"),
    ),
    # Lockstep.
    _own("own-preferences", "benign", change=_PAIRS, recipe="sft"),
    _own(
        "own-critic",
        "benign",
        change="sed -i 's/^recipe: grpo/recipe: ppo/; /^group_size/d' run.yaml",
        home="/home/user/ppo",
    ),
    _own(
        "own-zero",
        "benign",
        change="sed -i 's/trainer: {ranks: 2/trainer: {kind: deepspeed, ranks: 2/' run.yaml",
        recipe="sft",
    ),
    _own(
        "own-reward-division",
        "rank_exception_masked",
        change="printf 'def share(prompts, completions, answer, **kwargs):\\n    return [len(set(each)) / "
        "(len(each) - 4) for each in completions]\\n' >> rewards.py",
        culprit=("rewards.py",),
        alt=(("share",), ("rewards.py:share",), ("scorer-0",)),
        reward="share",
        also_ok=("config_error",),
    ),
    _own(
        "own-misspelt-field",
        "config_error",
        change="sed -i 's/^token_budget/tokens_budget/' run.yaml",
        recipe="sft",
    ),
    _own(
        "own-long-prompts",
        "config_error",
        change="python -c \"import json; print(json.dumps({'prompt': '1' * 90, 'answer': '1', 'completion': '1'}))"
        '" > data/train.jsonl',
        also_ok=("storage_fault",),
    ),
    _own(
        "own-disk-full",
        "storage_fault",
        recipe="sft",
        run="unshare -m bash -c 'mkdir runs; mount -t tmpfs -o size=600k tmpfs runs; lockstep train run.yaml'",
    ),
    _own(
        "own-model-cut",
        "storage_fault",
        recipe="sft",
        change="truncate -s 9000 model/model.safetensors",
        also_ok=("config_error",),
    ),
    # Meant to be refused, and the next one to be healthy.
    _own(
        "own-foreign-vocabulary",
        "benign",
        recipe="sft",
        change='sed -i \'s/"prompt": "/"prompt": "sort: \\u00e9/\' data/train.jsonl',
    ),
    _own(
        "own-evaluated",
        "config_error",
        recipe="sft",
        change="printf 'evaluation: {every: 4, data: {path: data/train.jsonl}}\\n' >> run.yaml",
    ),
]
