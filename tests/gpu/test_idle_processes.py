from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sampler_service.vllm.environment import sampler_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# CUDA reads the device list once, at its first use.
SCRIPT = """
import os, socket
from tandem.protocol.worker_link import PooledLink
from {module} import import_libraries
ours, theirs = socket.socketpair()
PooledLink(report_fd=2, spec=theirs).preload(import_libraries)
assert ours.recv(1)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import torch
print("devices:", torch._C._cuda_getDeviceCount())
os._exit(0)
"""


@pytest.mark.parametrize(
    "module", ["trainer_service.service.libraries", "sampler_service.vllm.libraries"]
)
def test_the_devices_of_a_worker_are_chosen_after_the_imports(module):
    stdin, lifeline = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT.replace("{module}", module)],
            env=sampler_environment(os.environ, cpu=False, library=None),
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=300,
        )
    finally:
        os.close(stdin)
        os.close(lifeline)
    assert "devices: 0" in done.stdout, done.stderr[-2000:]
