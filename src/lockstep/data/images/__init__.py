"""Images of prompts: where they come from, how they are prepared for a model, and where prepared images are kept."""
