import subprocess
import sys

PROGRAM = """
import resource
from lockstep.base.limits import MAX_DESCRIPTORS, raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raised = raise_descriptor_limit()
expected = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
assert raised == expected > 256, (raised, hard)
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (raised, hard)
assert raise_descriptor_limit() == raised
"""


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_limit() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
