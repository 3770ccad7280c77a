"""What the chapters of *Many devices, one model* share.

`import helpers` makes the settings that MXNet reads when it loads (see `helpers.engine`), and
nothing more: MXNet itself is imported when one of the names below is first used, so that a
machine on which MXNet is missing or broken can still be looked at. A kernel that isn't the course's
gets a warning.

Nothing that a chapter teaches is hidden here: `helpers.parallel`, `schedules`, `by_hand`,
`networks` and `torch_networks` hold what a notebook builds in the open and others import.
"""

from importlib import import_module

from helpers import engine

engine.prepare()

_HOME = {
    "devices": "device",
    "load_data": "data",
    "split_and_load": "parallel",
    "allreduce": "parallel",
    "assert_replicas_equal": "parallel",
    "your_turn": "exercise",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"helpers has no {name!r}; it has {', '.join(_HOME)}")
    return getattr(import_module(f"helpers.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *_HOME])
