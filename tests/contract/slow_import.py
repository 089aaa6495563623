"""A module whose import keeps a processor busy for some seconds, as torch's does on a loaded host."""

import time

_until = time.process_time() + 3.0
while time.process_time() < _until:
    pass
