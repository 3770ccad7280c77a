#!/bin/sh
# Makes or updates .venv, the one environment that everything in the course runs in.
#
#   sh requirements/setup.sh                 does nothing when .venv is up to date
#   TORCH=1 sh requirements/setup.sh         the same, and PyTorch in it
#   GPU=1 sh requirements/setup.sh           MXNet's build for GPUs, with CUDA's libraries: 4 GB;
#                                            GPU=0: that for CPUs; without: as this machine has it
#   sh requirements/setup.sh --find-lock     prints the lock that it would install
#   sh requirements/setup.sh --find-python   prints the Python 3.11 that it would use
#   sh requirements/setup.sh --find-uv       prints the uv that it would use; gets one if need be
#
# Needs no root and writes nothing outside the repository, save for uv's own cache.
set -eu
cd "${0%/*}/.."

python_version=3.11   # the only one that NumPy 1.23.5 has wheels for and MXNet 1.9.1 runs on
uv_version=0.13.8     # fetched into build/uv where no uv is installed
torch_version=2.13.0
stamp=.venv/.stamp

stop() {
    echo "setup: $*" >&2
    exit 1
}

# Prints the first Python for which the expression $1 is true. Each one is run, since a name on
# the PATH proves nothing: a version manager leaves launchers there for Pythons it doesn't have.
first_python() {
    if [ -n "${PYTHON:-}" ] && try_python "$PYTHON" "$1"; then return; fi
    for name in "python$python_version" python3 python; do
        old_ifs=$IFS; IFS=:
        for folder in $PATH; do
            IFS=$old_ifs
            try_python "$folder/$name" "$1" && return
        done
        IFS=$old_ifs
    done
    for python in "${HOME:-}/.pyenv/versions/$python_version"*/bin/python; do
        try_python "$python" "$1" && return
    done
    return 1
}

# `_base_executable` is the Python below a virtual environment: .venv is about to be remade,
# and may be the one that is active.
try_python() {
    command -v "$1" >/dev/null 2>&1 || return 1
    found=$("$1" -c "
import sys
print(getattr(sys, '_base_executable', '') or sys.executable) if $2 else sys.exit(1)
" 2>/dev/null) && [ -x "$found" ] && echo "$found"
}

find_python() {
    first_python "'%d.%d' % sys.version_info[:2] == '$python_version'"
}

find_uv() {
    for uv in uv build/uv/bin/uv; do
        if "$uv" --version >/dev/null 2>&1; then command -v "$uv"; return; fi
    done
    # Not every Python can make an environment: Debian ships ensurepip as a package of its own.
    python=$(first_python "sys.version_info >= (3, 9) and __import__('ensurepip')") ||
        stop "install python$python_version with its venv module" \
            "(Debian and Ubuntu: python3-venv), or uv, then try again."
    echo "Fetching uv $uv_version into build/uv" >&2
    rm -rf build/uv
    "$python" -m venv build/uv >&2 &&
        build/uv/bin/python -m pip install --quiet "uv==$uv_version" >&2 ||
        stop "uv could not be fetched: check the network, or install uv, then try again."
    echo build/uv/bin/uv
}

# What was chosen once stays, also when a driver is away for an hour; GPU says otherwise.
choose_lock() {
    cpu=requirements/cpu.txt gpu=requirements/gpu.txt
    case ${GPU:-} in
        0) echo $cpu ;;
        1) echo $gpu ;;
        "") if made_from $cpu || { ! made_from $gpu && ! usable_gpu; }; then
                echo $cpu
            else
                echo $gpu
            fi ;;
        *) stop "GPU=$GPU: must be 1 (the build for GPUs) or 0 (for CPUs), or not be set." ;;
    esac
}
made_from() { [ "$(cat $stamp 2>/dev/null)" = "$(pwd -P) $(cksum <"$1")" ]; }
usable_gpu() {
    python=$(first_python "sys.version_info >= (3, 8)") && "$python" helpers/gpu.py 2>/dev/null
}

case ${1:-} in
    --find-lock) choose_lock; exit ;;
    --find-python) find_python; exit ;;
    --find-uv) find_uv; exit ;;
esac

# The stamp says what .venv was made from, and where: an environment that was moved with its
# repository holds the old place in its scripts. It is written when all is done and taken away
# before anything is changed, so where there is none, .venv may be half made, and is made anew.
root=$(pwd -P)
lock=$(choose_lock)
wanted="$root $(cksum <$lock)"
made() { [ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c "" 2>/dev/null; }
torch_made() { [ "$(cat .venv/.torch 2>/dev/null)" = $torch_version ]; }
ready() { made && { [ "${TORCH:-0}" != 1 ] || torch_made; }; }
if ready; then exit; fi

# One set-up at a time: the second waits, and finds it done. (Macs have no flock.)
exec 9<requirements/setup.sh
if command -v flock >/dev/null && ! flock -n 9; then
    echo "setup: waiting for another set-up of this folder to end" >&2
    flock 9
    if ready; then exit; fi
fi

uv=$(find_uv)
with_torch=${TORCH:-0}
if [ -e .venv/.torch ]; then with_torch=1; fi   # chosen once, it stays too
if ! made; then
    rm -f $stamp
    rm -rf .venv
    # With no Python of the right version on the machine, uv fetches one of its own.
    "$uv" venv --quiet --python "$(find_python || echo $python_version)" .venv ||
        stop "install Python $python_version (there is none on this machine and uv could not" \
            "fetch one), then try again."
    if [ "$(uname)" = Linux ]; then
        .venv/bin/python -c "import ctypes; ctypes.CDLL('libgomp.so.1')" 2>/dev/null ||
            stop "MXNet needs the system library libgomp.so.1: install the package libgomp1" \
                "(Fedora: libgomp), then try again."
    fi
    # Compiled now, not when first imported: that takes seven seconds for MXNet alone, and every
    # time where Python may not write (PYTHONDONTWRITEBYTECODE, an environment mounted read-only).
    "$uv" pip install --quiet --compile-bytecode --python .venv/bin/python --require-hashes \
        -r $lock ||
        stop "the packages could not be installed (uv says why above): check the network, then" \
            "try again."
    # With this, `import helpers` works from any folder, so in every notebook's kernel.
    echo "$root" >"$(.venv/bin/python -c \
        "import sysconfig; print(sysconfig.get_path('purelib'))")/many_devices.pth"
    echo "$wanted" >$stamp
fi
if [ "$with_torch" = 1 ] && ! torch_made; then
    rm -f $stamp
    # Not in the lock: machines differ in the build that they want, with CUDA or without. pip reads
    # the settings with which a machine says where to look; uv has its own.
    if "$uv" pip install --quiet --python .venv/bin/python pip &&
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action \
            ignore "torch==$torch_version"
    then
        echo $torch_version >.venv/.torch
        echo "$wanted" >$stamp
    else
        # pip fetches everything before it installs anything: mostly, nothing has changed.
        .venv/bin/python -c "
import sys
from importlib.util import find_spec
sys.exit(find_spec('torch') is not None)" && echo "$wanted" >$stamp
        stop "PyTorch could not be installed (pip says why above): check the network and the disk" \
            "(it takes up to 6 GB), then try again, or do without: make setup."
    fi
fi
case $lock in *gpu*) for=", MXNet for GPUs" ;; *) for= ;; esac
echo "Ready: .venv, $(.venv/bin/python --version)$for" >&2
