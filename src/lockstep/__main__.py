"""`python -m lockstep`: the command, where the interpreter's scripts are not on the path."""

from lockstep.cli import app

app(prog_name="lockstep")
