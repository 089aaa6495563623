"""Policy, engine and a full run on a GPU: `script/test tests/gpu` on a machine with CUDA."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.config.model import ModelConfig
from lockstep.data.row_layout import RowLayout
from lockstep.models.attention_plan import QuerySubset
from lockstep.models.cascade_attention import CUDA_KERNELS, merged_attention
from lockstep.models.model_loader import load_policy
from lockstep.models.packing_probe import probe_packing
from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.builtin.fused_forward import FusedForward
from lockstep.rollout.builtin.model_runner import CachedRunner, use_plain_attention
from lockstep.rollout.engine_protocol import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("gpu") / "model", hidden=64, heads=4, kv_heads=2, ffn=128, max_length=128)


def forest() -> tuple[torch.Tensor, RowLayout, torch.Tensor, torch.Tensor]:
    """A prompt with two completions, and a document."""
    layout = RowLayout([5, 4, 3, 6], [-1, 0, 0, -1])
    tokens = torch.arange(18) % 60 + 4
    sources = torch.tensor([4, 5, 6, 7, 4, 9, 10, 12, 13])
    targets = torch.tensor(
        [tokens[5], tokens[6], tokens[7], tokens[8], tokens[9], tokens[10], tokens[11], tokens[13], 7]
    )
    return tokens, layout, sources, targets


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_the_policy_equals_the_one_on_the_cpu(folder: Path, dtype: str, tolerance: float) -> None:
    tokens, layout, sources, targets = forest()
    config = ModelConfig.model_validate({"path": str(folder), "dtype": dtype})
    with torch.no_grad():
        expected, _ = load_policy(ModelConfig(path=str(folder)), "cpu")(tokens, layout, sources, targets)
        found, _ = load_policy(config, "cuda")(tokens.cuda(), layout, sources.cuda(), targets.cuda())
    torch.testing.assert_close(found.float().cpu(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("whole", [(), (1, 4)], ids=["text", "with images"])
def test_the_merge_of_variable_length_parts_is_exact(whole: tuple[int, ...]) -> None:
    """bfloat16 against float32 with a mask, forward and gradients; the tolerance is bfloat16's."""
    layout = RowLayout([40, 64, 33, 7, 5, 90, 12], [-1, 0, 0, 2, -1, 4, 5], whole=whole)
    q, k, v = (torch.randn(layout.tokens, heads, 64, device="cuda") for heads in (4, 2, 2))
    weights = torch.randn_like(q)
    found = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    assert CUDA_KERNELS.supports(found[0], found[2])
    out = merged_attention(*found, QuerySubset.all_of(layout), 0.125, CUDA_KERNELS)
    (out * weights).sum().backward()
    plain = [x.detach().float().requires_grad_() for x in found]
    wide = [plain[0], *(x.repeat_interleave(2, 1) for x in plain[1:])]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in wide), attn_mask=layout.mask("cuda"), scale=0.125
    )[0].transpose(0, 1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    for one, other in zip(found, plain, strict=True):
        assert float((one.grad.float() - other.grad).norm() / other.grad.norm()) < 2e-2


def test_the_packing_test_passes(folder: Path) -> None:
    assert probe_packing(load_policy(ModelConfig(path=str(folder), dtype="float32"), "cuda")).mode == "forest"


def test_greedy_generation_equals_transformers(folder: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = np.random.default_rng(0).integers(4, 60, (3, 7)).astype(np.int32)
    with torch.no_grad():
        ids = torch.from_numpy(prompts).long().cuda()
        wanted = lm.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 7:].tolist()
    engine = BuiltinEngine(lm, tokenizer, max_rows=2)
    engine.submit(
        [
            Request(str(n), str(n), row, n, temperature=0, max_tokens=12, ignore_eos=True)
            for n, row in enumerate(prompts)
        ]
    )
    done: dict[str, list[int]] = {}
    while len(done) < 3:
        done.update({completion.request: completion.tokens.tolist() for completion in engine.step()})
    assert [done[str(n)] for n in range(3)] == wanted


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)])
def test_fused_steps_in_cuda_graphs_equal_the_model(folder: Path, dtype: torch.dtype, tolerance: float) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda()
    engine = BuiltinEngine(lm, AutoTokenizer.from_pretrained(folder), max_rows=6)
    runner = engine._runner
    assert isinstance(runner, CachedRunner) and isinstance(runner.forward, FusedForward) and runner._graphs is not None
    random = np.random.default_rng(1)
    prompts = [random.integers(4, 60, size).astype(np.int32) for size in (20, 1, 7)]
    requests = [
        Request(f"{g}/{k}", str(g), prompts[g], 9 * g + k, max_tokens=5 + 9 * k, ignore_eos=True)
        for g in range(3)
        for k in range(4)
    ]
    engine.submit(requests)
    done = {}
    while len(done) < len(requests):
        done.update({completion.request: completion for completion in engine.step()})
    use_plain_attention(lm)
    for request in requests:
        got = done[request.id]
        sequence = torch.from_numpy(np.concatenate([request.prompt, got.tokens]).astype(np.int64)).cuda()
        with torch.inference_mode():
            logprobs = torch.log_softmax(lm(sequence.unsqueeze(0), use_cache=False).logits[0].float(), -1).cpu()
        at = torch.arange(len(request.prompt), len(sequence))
        np.testing.assert_allclose(got.logprobs, logprobs[at - 1, sequence.cpu()[at]].numpy(), atol=tolerance)


@pytest.mark.parametrize(
    ("adapter", "offload"),
    [
        (None, {}),
        (None, {"parameters": True, "optimizer": True}),
        ({"kind": "lora"}, {"optimizer": True}),
        ({"kind": "dora", "lora_dropout": 0.1}, {}),
    ],
)
def test_a_run_on_one_gpu(tmp_path: Path, adapter: dict[str, object] | None, offload: dict[str, bool]) -> None:
    from harness import config, task, train

    folder = task(tmp_path)
    changes = {"model": {"path": str(folder / "model"), "adapter": adapter}}
    trainer = {"ranks": 1, "offload": offload}
    cluster = {"kind": "local", "device": "cuda"}
    run = train(folder, config(folder, "grpo", steps=3, trainer=trainer, cluster=cluster, **changes))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["policy/engine_gap_max"] for row in rows if "policy/engine_gap_max" in row]
    assert len(gaps) == 3
    assert max(gaps) < 0.3  # bf16 engine against bf16 trainer


def test_offloading_frees_the_device_and_restores_the_state(folder: Path) -> None:
    from lockstep.config.recipes import SFTConfig
    from lockstep.train.distributed import ParallelContext
    from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

    values = {"recipe": "sft", "name": "x", "steps": 1, "model": {"path": str(folder), "dtype": "float32"}}
    config = SFTConfig.model_validate(values | {"data": {"path": "unused"}})
    trainer = FSDP2Trainer(config.policy, ParallelContext(device=torch.device("cuda", torch.cuda.current_device())))
    before, held = {name: rows.clone().cpu() for name, rows in trainer._rows().items()}, torch.cuda.memory_allocated()
    size = sum(rows.nbytes for rows in trainer._rows().values())
    trainer.offload(parameters=False, optimizer=True)
    assert held - torch.cuda.memory_allocated() >= 2 * size
    trainer.offload()
    assert held - torch.cuda.memory_allocated() >= 3 * size
    with pytest.raises(RuntimeError, match="call onload"):
        trainer.evaluate([], [])
    trainer.onload()
    assert all(torch.equal(rows.cpu(), before[name]) for name, rows in trainer._rows().items())
    assert {rows.device.type for rows in trainer.optimizer.exp_avg.values()} == {"cuda"}


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_a_quantized_base_trains_its_adapter(tmp_path: Path, kind: str, adapter: str) -> None:
    pytest.importorskip("bitsandbytes")
    from harness import config, task, train

    folder = task(tmp_path)
    model = {"path": str(folder / "model"), "adapter": {"kind": adapter, "r": 4}, "quantization": {"kind": kind}}
    cluster = {"kind": "local", "device": "cuda"}
    run = train(folder, config(folder, "grpo", steps=3, trainer={"ranks": 1}, cluster=cluster, model=model))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["policy/engine_gap_max"] for row in rows if "policy/engine_gap_max" in row]
    assert len(gaps) == 3 and max(gaps) < 0.3, "the engine serves the dequantized weights"
    exported = AutoModelForCausalLM.from_pretrained(run / "export")
    assert getattr(exported.config, "quantization_config", None) is None


def test_a_sleeping_engine_frees_its_caches_and_goes_back_to_work(folder: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    engine = BuiltinEngine(lm, AutoTokenizer.from_pretrained(folder), max_rows=64)
    prompt = np.arange(4, 40, dtype=np.int32)

    def complete(name: str) -> list[int]:
        engine.submit([Request(name, name, prompt, 3, max_tokens=20, ignore_eos=True)])
        while not (done := engine.step()):
            pass
        return list(done[0].tokens)

    before, held = complete("before"), torch.cuda.memory_allocated()
    engine.sleep()
    assert torch.cuda.memory_allocated() < held
    engine.wake()
    assert complete("after") == before


def test_ppo_whose_roles_take_turns_on_one_gpu(tmp_path: Path) -> None:
    """Policy, critic, reference, two reward models and an engine; with `all`, one of them at a time is on the GPU."""
    from harness import task, train
    from test_colocation import make_scorer, settings

    home = task(tmp_path)
    make_scorer(home)
    run = train(home, settings(home, "all", placement={"colocate": "all"}, cluster={"kind": "local", "device": "cuda"}))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["policy/engine_gap_max"] for row in rows if "policy/engine_gap_max" in row]
    assert gaps and max(gaps) < 0.3
