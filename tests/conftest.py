"""What all the tests share: repeatable property tests without deadlines, and the GPU, where there is one."""

import pytest
import tvm
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def cuda():
    """The first CUDA GPU; the test is skipped where there is none."""
    device = tvm.cuda(0)
    if not device.exist:
        pytest.skip("no CUDA GPU on this machine")
    return device
