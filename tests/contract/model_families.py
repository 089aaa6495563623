"""Tiny models of many families, as transformers makes and saves them, and what two trainer ranks do with them."""

from pathlib import Path
from typing import Any

import fsdp_ranks as fr
import torch
import trainer_ranks as tr
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep.config.model import ModelConfig
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.packing_probe import probe_packing
from lockstep.models.tiny_model import make_tiny
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256}
USUAL = SIZES | {"num_key_value_heads": 2, "intermediate_size": 48}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
"""Five experts on two ranks: one rank has more rows than the other."""
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1}
# transformers always computes this way and ignores the names; vLLM reads them from the published config.
ROUTED |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "shared_expert_intermediate_size": 16}
LINEAR |= dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", USUAL),
    "qwen2": ("Qwen2", USUAL | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", USUAL | {"head_dim": 8}),
    "mistral": ("Mistral", USUAL | {"sliding_window": 8}),
    "gemma2": ("Gemma2", USUAL | WINDOWS | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "mixtral": ("Mixtral", USUAL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", USUAL | EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3Moe", USUAL | EXPERTS | {"head_dim": 8, "mlp_only_layers": [0]}),
    "deepseek-v3": ("DeepseekV3", USUAL | LATENT | ROUTED | {"num_key_value_heads": 4}),
    "gpt-neox": ("GPTNeoX", SIZES | {"intermediate_size": 48}),
    "gemma3": ("Gemma3", USUAL | WINDOWS | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "olmo2": ("Olmo2", USUAL),
    "phi3": ("Phi3", USUAL | {"original_max_position_embeddings": 256}),
    "gpt-oss": ("GptOss", USUAL | WINDOWS | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": ("Glm4", USUAL | {"head_dim": 8}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen3-next": ("Qwen3Next", USUAL | EXPERTS | LINEAR),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}
"""transformers' name and the sizes of each family's tiny model."""


VLLM_SIZES = {"hidden_size": 128, "n_embd": 128, "intermediate_size": 64, "shared_expert_intermediate_size": 64}
VLLM_SIZES |= {"head_dim": 32, "query_pre_attn_scalar": 32}
VLLM_SIZES |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
"""The smallest sizes for which vLLM has kernels on a CPU, as far as they differ."""


def for_vllm(family: str) -> tuple[str, dict[str, Any]]:
    """transformers' name and the sizes of a model of the family that vLLM can compute on a CPU."""
    name, fields = FAMILIES[family]
    return name, fields | {field: size for field, size in VLLM_SIZES.items() if field in fields}


def make_family(folder: Path, family: str) -> Path:
    """Writes a tiny model of the family and a tokenizer into `folder`, as transformers saves it."""
    return make_model(folder, *FAMILIES[family])


def make_model(folder: Path, name: str, fields: dict[str, Any]) -> Path:
    """The same for a model of these sizes."""
    make_tiny(folder, hidden=32, heads=2, kv_heads=1, ffn=32, max_length=256)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    for left in ("generation_config.json", "lockstep_tiny.json", "model.safetensors"):
        (folder / left).unlink(missing_ok=True)
    ids = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = config_class(vocab_size=len(tokenizer), dtype="float32", **fields, **ids)
    torch.manual_seed(3)
    lm = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in [*lm.parameters(), *(buffer for name, buffer in lm.named_buffers() if "correction" in name)]:
            tensor.add_(torch.randn_like(tensor) * 0.05)
    lm.save_pretrained(folder)
    return folder


WITHOUT_SCORES = ("mamba",)
"""Families of which transformers has no class with a head for scores."""


def make_scorer(folder: Path, family: str) -> Path:
    """Writes a tiny reward model of the family, as transformers saves it."""
    config = AutoModelForCausalLM.from_pretrained(make_family(folder, family)).config
    config.num_labels = 1
    torch.manual_seed(4)
    lm = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    lm.save_pretrained(folder)
    return folder


def train_and_export(recipe: str) -> tr.Case:
    """Trains one step, and exports the model."""

    def run(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
        cfg = tr.config(folder, "model", recipe, model={"max_length": 256})
        trainer = FSDP2Trainer(cfg.policy, ranks)
        mode = probe_packing(trainer.policy, trainer.compute_dtype)
        result = fr.train(trainer, tr.batch_of(cfg, ranks.world, mode=mode.mode), 1)
        result.extra["mode"] = mode.mode
        result.extra["fused"] = trainer.policy.fused_decoder is not None and trainer.policy.fused_decoder.enabled
        trainer.export(folder / f"exported-{recipe}")
        return result

    return run


ROUTER_LOSS = 0.5


def router_loss(**trainer: Any) -> tr.Case:
    """Trains one step with the routers' auxiliary loss, one document per micro-batch."""

    def run(folder: Path, ranks: ParallelContext, port: int) -> tr.Result:
        model = {"max_length": 256, "router_aux_loss": ROUTER_LOSS}
        trained = FSDP2Trainer(tr.config(folder, "model", "sft", model, **trainer).policy, ranks)
        return fr.train(trained, tr.batch_of(trained.role, ranks.world, 24, "single"), 1)

    return run


def documented() -> dict[str, list[str]]:
    """The rows of the table of families in docs/models.md."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.split("| family |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


CASES = {recipe: train_and_export(recipe) for recipe in ("sft", "grpo")} | {
    "router": router_loss(),
    "router-recomputed": router_loss(activation_checkpointing=True),
}
