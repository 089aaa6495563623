"""A module whose import uses the CPU for some seconds, like torch's on a loaded host."""

import time

_until = time.process_time() + 3.0
while time.process_time() < _until:
    pass
