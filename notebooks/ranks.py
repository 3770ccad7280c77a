"""Runs a function in several processes of this machine, the ranks of torch.distributed.

    from ranks import ranks

    ranks(function, 5, world=3)  # function(5) on each of three ranks; a list of what they returned

The processes send by gloo, and stay for the next call. They know the variables of the notebook or
script that `function` is from.
"""

import signal
import socket
import sys
import tempfile
import warnings
from concurrent.futures import FIRST_EXCEPTION, wait
from importlib import import_module

import torch
from joblib.externals.loky import get_reusable_executor

warnings.filterwarnings("ignore", "A worker stopped")  # loky renews one whose memory has grown
# The first network interface, on Linux the loopback, which no other machine can reach.
VARIABLES = {"GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1], "TORCH_CPP_LOG_LEVEL": "ERROR"}

largest = 1  # world so far, and so the number of processes


def on_rank(rank, world, folder, seconds, part, given):
    """Meet the other ranks in a file and run `part`; an alarm ends it, whatever it waits for."""
    # Imported now: its functions take the current group as a default, and would keep it alive.
    import_module("torch.distributed.nn")
    signal.alarm(seconds + 5)
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    torch.distributed.barrier()  # all are connected: none fails because another has ended
    try:
        return part(*given)
    finally:
        torch.distributed.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:  # DTensor's caches would keep the old rank
            import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
        signal.alarm(0)


def first_cause(tasks):
    """The error of one rank; those that it caused, broken connections, come last."""
    errors = [task.exception() for task in wait(tasks, 2).done if task.exception()]
    for error in errors:
        if "gloo/transport" not in str(error):
            return error
    return errors[0]


def ranks(part, *given, world=2, seconds=60):
    """What `part(*given)` returned on each of `world` ranks, in their order.

    Raises the error of a rank, not one that it has caused on another, and TimeoutError where a rank
    still runs after `seconds`. Then all processes are ended.
    """
    global largest
    largest = max(largest, world)  # a pool that shrinks and grows would start processes anew
    pool = get_reusable_executor(largest, timeout=600, env=VARIABLES)
    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for rank in range(world):
            tasks.append(pool.submit(on_rank, rank, world, folder, seconds, part, given))
        try:
            done, running = wait(tasks, seconds, FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                raise first_cause(tasks)
            if running:
                raise TimeoutError(f"{len(running)} of {world} ranks still ran after {seconds} s")
        except BaseException:
            pool.shutdown(kill_workers=True)
            raise
    return [task.result() for task in tasks]
