"""Prints which tokens of the data supervised fine-tuning learns: those in brackets.

python examples/learned_tokens.py CONFIG.yaml [ROWS]
"""

import sys
from pathlib import Path

from lockstep.config.loader import load_config
from lockstep.data.mixture import open_training_source
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.source_factory import SourceOptions
from lockstep.models.model_loader import load_tokenizer


def main(file: str, rows: int = 3) -> None:
    config = load_config(Path(file))
    tokenizer = load_tokenizer(config.model)
    limit, options = LengthLimit(config.token_budget), SourceOptions(learns_prompts=config.learns_prompts)
    source = open_training_source("documents", config.data.in_file_order, tokenizer, config.seed, limit, options)
    for document in source.take(0, min(rows, len(source))):
        shown = []
        for token, learned in zip(document.tokens.tolist(), document.loss_mask.tolist(), strict=True):
            text = tokenizer.decode([token]).replace("\n", "\\n")
            shown.append(f"[{text}]" if learned else text)
        sys.stdout.write(f"row {document.row}: {document.loss_mask.sum()} of {len(shown)} tokens are learned\n")
        sys.stdout.write(f"  {' '.join(shown)}\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
