"""TRL's trainers and other scripts on transformers' Trainer."""
