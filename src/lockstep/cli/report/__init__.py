"""The commands that show a run in a browser: `lockstep report` and `lockstep dashboard`."""
