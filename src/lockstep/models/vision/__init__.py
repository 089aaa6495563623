"""Vision-language models: images in packed rows, positions of their tokens, and tiny models of their families."""
