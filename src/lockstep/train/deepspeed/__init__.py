"""The DeepSpeed trainer: ZeRO stages 0 to 3, with the settings of a DeepSpeed JSON file."""
