"""notebooks/resumable_train.py on two machines, one of which leaves and is replaced."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from helpers.cluster import torchrun

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is optional: make setup TORCH=1")

PROGRAM = Path(__file__).resolve().parents[2] / "notebooks/resumable_train.py"
SLOW = 300  # seconds that nothing here takes


def start_machine(port, address, is_host, *arguments):
    """torchrun as on a machine of its own: one of two, with one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
               "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.2:{port}",
               f"--local-addr={address}", f"--rdzv-conf=is_host={is_host},keep_alive_interval=1",
               PROGRAM, *arguments]
    # With a shared store a machine that stays would keep the address of the old rank 0.
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
           "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            text=True)


def test_where_another_machine_comes_in_ranks_change_and_it_goes_on_bit_for_bit(tmp_path):
    source = torch.Generator().manual_seed(0)
    torch.save([torch.randn(512, 1, 28, 28, generator=source),
                torch.randint(10, (512,), generator=source)], tmp_path / "data.pt")
    torchrun(PROGRAM, 2, arguments=[tmp_path, "whole"], log=None)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    machines = [start_machine(port, "127.0.0.2", 1, tmp_path, "moved"),  # rank 0, later 1
                start_machine(port, "127.0.0.3", 0, tmp_path, "moved", "--leave-at", "22")]
    try:
        deadline = time.monotonic() + SLOW
        while not (tmp_path / "moved.pt").exists():  # both have begun
            assert time.monotonic() < deadline
            time.sleep(0.1)
        machines.append(start_machine(port, "127.0.0.1", 0, tmp_path, "moved"))
        printed = [machine.communicate(timeout=SLOW)[0].splitlines() for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()
            machine.wait()
    begun, resumed = [f'training "moved" begins at step {step}; ranks: 2' for step in (0, 20)]
    assert printed == [[begun, resumed], [begun], [resumed]]
    whole = torch.load(tmp_path / "whole.weights")
    moved = torch.load(tmp_path / "moved.weights")
    assert list(moved) == list(range(20, 48))
    assert all(torch.equal(moved[step], whole[step]) for step in moved)
