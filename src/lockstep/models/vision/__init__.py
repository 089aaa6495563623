"""Vision-language models: their parts, and their forward with images."""
