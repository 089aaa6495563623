"""The model, its precision and its adapter."""

from typing import Literal, Self

from pydantic import Field, model_validator

from lockstep.config.section import Section
from lockstep.config.vision import VisionConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]


class AdapterConfig(Section):
    """A low-rank adapter that is trained instead of the model's own weights. Field names as in peft's `LoraConfig`."""

    path: str | None = None
    """Start from an adapter in peft's format, a folder or a hub name. Its settings are used; fields set here must agree
    with them, except the dropout. A new adapter when absent."""
    kind: Literal["lora", "dora"] = "lora"
    """LoRA (Hu et al. 2021), or DoRA, which also learns a magnitude per output (Liu et al. 2024)."""
    r: int = Field(16, gt=0)
    """Rank."""
    lora_alpha: float = Field(32.0, gt=0)
    """The update is scaled by `lora_alpha / r`."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """On the adapter's input, in training only; the masks depend on step and micro-batch, also after resuming."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field("all-linear", min_length=1)
    """Names of linear layers, or suffixes (`q_proj`); `all-linear` means all except the output layer. Of a model that
    sees, `all-linear` means the language model; names also reach tower and projector, unless they are frozen."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules, or suffixes (`lm_head`, `embed_tokens`, `norm`), that are fully trained in addition to the
    adapter and exported with it. Weights that the model ties stay tied."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(r)` (Kalajdzievski 2023)."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """Initial A: uniform as in Microsoft's LoRA, or normal with deviation `1 / r`. B starts at zero."""

    @property
    def scaling(self) -> float:
        """Factor of the product B A."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class QuantizationConfig(Section):
    """Stores the weights that an adapter freezes in 4 or 8 bits on the trainer's GPU (QLoRA, Dettmers et al. 2023),
    with bitsandbytes."""

    kind: Literal["nf4", "int8"] = "nf4"
    double_quant: bool = True
    """For nf4: quantize the constants of blocks as well (`bnb_4bit_use_double_quant`)."""


class ModelConfig(Section):
    path: str
    """A local folder or a hub name; also the default for the tokenizer."""
    tokenizer: str | None = None
    """Another folder or hub name for the tokenizer."""
    revision: str | None = None
    dtype: DType = "auto"
    """Compute precision: float32 on CPU, bfloat16 (with float32 master weights) on GPU."""
    trust_remote_code: bool = False
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What is computed from the last hidden states: log-probabilities of tokens, or a score per token. The recipe sets
    it."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's template."""
    packing: Literal["auto", "forest", "block", "single"] = "auto"
    """`auto` tests the model when it is loaded: shared prompts (forest), else isolated samples in a row (block), else
    one sample per row (single)."""
    adapter: AdapterConfig | None = None
    """Train a LoRA or DoRA adapter; all weights are trained when absent."""
    quantization: QuantizationConfig | None = None
    """Quantization of the frozen weights under an adapter."""
    router_aux_loss: float | None = Field(None, ge=0)
    """Coefficient of the auxiliary loss that balances the experts of a mixture-of-experts model; 0 for none. When
    absent, the model's `router_aux_loss_coef` if its config has `output_router_logits: true`, else none."""
    max_length: int | None = Field(None, gt=0)
    """Longest sequence (prompt and completion); the model's own limit when absent."""
    vision: VisionConfig = VisionConfig()
    """Images of a vision-language model."""

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        if self.quantization is not None and self.adapter is None:
            raise ValueError("quantized weights are frozen and cannot be trained: set model.adapter as well")
        return self
