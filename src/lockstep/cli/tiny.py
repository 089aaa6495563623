"""`lockstep tiny`: creates a tiny model and its tokenizer, for examples and tests."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli.terminal import REFUSED, print_text, require_extra
from lockstep.report.command_events import TERMINAL


def command(
    folder: Annotated[Path, typer.Argument(help="Output folder; model.path can name it.")],
    family: Annotated[
        str,
        typer.Option(
            help="Architecture: qwen2, llama, or a vision-language model: qwen2_vl, qwen2_5_vl, qwen3_vl, smolvlm, "
            "idefics3, gemma3, internvl, llava_onevision."
        ),
    ] = "qwen2",
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 128,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key-value heads.")] = 2,
    ffn: Annotated[int, typer.Option(help="Hidden size of the feed-forward layers.")] = 512,
    max_length: Annotated[int, typer.Option(help="Longest sequence in tokens.")] = 256,
    alphabet: Annotated[
        str | None, typer.Option(help="Characters of the tokenizer; printable ASCII by default.")
    ] = None,
    tie_embeddings: Annotated[bool, typer.Option(help="Share one matrix between embedding and head.")] = True,
    chat: Annotated[
        bool, typer.Option(help="Add role tokens and a chat template. A vision-language model always has them.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tiny model that the folder holds.")] = False,
) -> None:
    """Create a tiny language or vision-language model with random weights and a character-level tokenizer."""
    require_extra("train", "lockstep tiny")
    from lockstep.models.tiny_model import DEFAULT_ALPHABET, TINY_FAMILIES, TinyModel, holds_tiny, make_tiny
    from lockstep.models.vision.tiny_families import VISION_FAMILIES
    from lockstep.models.vision.tiny_vision import TinyVision, make_tiny_vision

    common: dict[str, Any] = {
        "family": family,
        "alphabet": DEFAULT_ALPHABET if alphabet is None else alphabet,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "max_length": max_length,
        "tie_embeddings": tie_embeddings,
        "seed": seed,
    }
    try:
        if family not in TINY_FAMILIES and family not in VISION_FAMILIES:
            known = ", ".join((*TINY_FAMILIES, *VISION_FAMILIES))
            raise ValueError(f"family: {family!r} is unknown, expected one of {known}")
        vision = family in VISION_FAMILIES
        model = TinyVision(**common) if vision else TinyModel(**common, chat=chat)
        if holds_tiny(folder, model) and not overwrite:
            print_text(f"{folder}: already holds this tiny model, and was left as it is (--overwrite writes it again)")
            return
        make = make_tiny_vision if vision else make_tiny
        make(folder, model, overwrite=overwrite)  # type: ignore[arg-type]  # each makes its own kind
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    print_text(f"{folder}: {family}, {layers} layers, hidden size {hidden}, seed {seed}")
