"""`lockstep tiny`: creates a tiny model and its tokenizer, for examples and tests."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import REFUSED, print_text, require_extra, show_refusal


def command(
    folder: Annotated[Path, typer.Argument(help="Output folder; model.path can name it.")],
    family: Annotated[str, typer.Option(help="Architecture: qwen2 or llama.")] = "qwen2",
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
    chat: Annotated[bool, typer.Option(help="Add role tokens and a chat template.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a tiny model that the folder holds.")] = False,
) -> None:
    """Create a tiny Qwen2- or Llama-type model with random weights and a character-level tokenizer."""
    require_extra("train", "lockstep tiny")
    from lockstep.models.tiny_model import DEFAULT_ALPHABET, TinyModel, holds_tiny, make_tiny

    try:
        model = TinyModel(
            family=family,  # type: ignore[arg-type]  # checked by TinyModel, with the valid names in its message
            alphabet=DEFAULT_ALPHABET if alphabet is None else alphabet,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            max_length=max_length,
            tie_embeddings=tie_embeddings,
            chat=chat,
            seed=seed,
        )
        if holds_tiny(folder, model) and not overwrite:
            print_text(f"{folder}: already holds this tiny model, and was left as it is (--overwrite writes it again)")
            return
        make_tiny(folder, model, overwrite=overwrite)
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    print_text(f"{folder}: {family}, {layers} layers, hidden size {hidden}, seed {seed}")
