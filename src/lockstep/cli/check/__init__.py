"""The command `lockstep check`: its arguments, and the checks of hosts, of the way between them, and of a plan."""
