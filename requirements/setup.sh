#!/bin/sh
# Makes or updates .venv, the one environment that everything in the course runs in.
#
#   sh requirements/setup.sh            does nothing where .venv is up to date
#   TORCH=1 sh requirements/setup.sh    the same, with PyTorch; once installed, it stays
#   GPU=1 sh requirements/setup.sh      MXNet's build for GPUs, with CUDA's libraries; GPU=0: that
#                                       for CPUs; without: as before, at first what the machine has
#   PYTHON=/path/to/python3.11 sh requirements/setup.sh    with this Python
#
# The Makefile and the doctor ask it, and nothing changes but that --get-uv may fetch uv:
#   --find-any, --get-uv     a Python from 3.8 on; uv
#   --find-lock, --state     the lock; "ready", or what .venv is instead
#
# Needs no root. Outside this folder it writes to the caches of uv and pip, to the system's folder
# for temporary files, and, where uv fetches a Python, to uv's folder for those.
set -eu
CDPATH='' cd "${0%/*}/.."

python_version=3.11   # the only one that NumPy 1.23.5 has wheels for and MXNet 1.9.1 runs on
uv_version=0.13.8     # fetched into build/uv where no uv is installed
torch_version=2.13.0
stamp=.venv/.many-devices
root=$(pwd -P)

say() { printf 'setup: %s\n' "$*" >&2; }

stop() {
    say "$@"
    exit 1
}

# What the tool said of it stands above.
failed() {
    stop "$*. The reason stands above; mostly it is the network or the disk (needed: $needs," \
        "here: $(df -Pk . | awk 'NR == 2 { printf "%.1f", $4 * 1.024e-6 }') GB free)." \
        "Mend it, then try again: what was fetched is kept."
}

# --- What is on this machine --------------------------------------------------------------------

# Make puts .venv first on the PATH, and so does whoever activates it. It may be made anew below, so
# what set-up works with must lie elsewhere.
while [ "$PATH" != "${PATH#"$root/.venv/bin:"}" ]; do PATH=${PATH#"$root/.venv/bin:"}; done

# Each one is run: a version manager leaves launchers on the PATH for Pythons that it doesn't have.
find_any() {
    for python in "${PYTHON:-python3}" python3 python$python_version python /usr/bin/python3; do
        if "$python" -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    stop "there is no Python from 3.8 on here: install one (python$python_version is best), then" \
        "try again."
}

get_uv() {
    for uv in uv build/uv/bin/uv; do
        if "$uv" --version >/dev/null 2>&1; then
            command -v "$uv"
            return
        fi
    done
    needs="0.1 GB"
    python=$(find_any)
    echo "Fetching uv $uv_version into build/uv" >&2
    { "$python" -m venv --clear build/uv &&
        build/uv/bin/python -m pip install --quiet "uv==$uv_version"; } >&2 ||
        failed "uv could not be fetched"
    echo build/uv/bin/uv
}

usable_gpu() { python=$(find_any 2>/dev/null) && "$python" helpers/gpu.py 2>/dev/null; }

case ${1:-} in
    --find-any) find_any; exit ;;
    --get-uv) get_uv; exit ;;
    --find-lock | --state) ;;
    "") # One set-up at a time. (Macs have no flock, and some network disks refuse it.)
        exec 9<requirements/setup.sh
        if command -v flock >/dev/null && ! flock -n 9 2>/dev/null; then
            say "waiting for another set-up of this folder to end"
            flock 9 || :
        fi ;;
    *) stop "there is no option $1; the first lines of requirements/setup.sh name them." ;;
esac

# --- The state of .venv -------------------------------------------------------------------------

# The stamp says "cpu none /the/folder sum": the build, PyTorch's version, and where (scripts in an
# environment hold its path) and from which lock .venv was made. It is the first file in there, and
# has neither folder nor sum until all is done: what was interrupted is made anew. What has no stamp
# is somebody's own. Only an empty folder, perhaps a mounted disk, has nothing to lose.
old_build='' old_torch=none old_made=''
if [ -f $stamp ] && [ ! -L .venv ]; then read -r old_build old_torch old_made <$stamp || :; fi
case $old_build in cpu | gpu) ;; *) old_build='' old_torch=none old_made='' ;; esac

case ${GPU:-} in
    0) build=cpu ;;
    1) build=gpu ;;
    "") if [ -n "$old_build" ]; then build=$old_build   # also when a driver is away for an hour
        elif usable_gpu; then build=gpu
        else build=cpu; fi ;;
    *) stop "GPU=$GPU: must be 1 (the build for GPUs) or 0 (for CPUs), or not be set." ;;
esac
case ${TORCH:-0} in
    0) torch=none; [ "$old_torch" = none ] || torch=$torch_version ;;
    1) torch=$torch_version ;;
    *) stop "TORCH=$TORCH: must be 1 (with PyTorch) or 0 (as it is), or not be set." ;;
esac
lock=requirements/$build.txt
made="$root $(cksum <$lock)"

has_packages() {
    [ "$old_build $old_made" = "$build $made" ] && .venv/bin/python -c "" 2>/dev/null
}

state() {
    if has_packages && [ "$old_torch" = "$torch" ]; then
        echo "ready"
    elif [ -L .venv ] || { [ -e .venv ] && [ ! -f $stamp ] && [ -n "$(ls -A .venv)" ]; }; then
        echo "foreign"
    elif [ -f $stamp ]; then
        echo "unfinished or out of date"
    else
        echo "not made yet"
    fi
}

state=$(state)
case ${1:-} in
    --find-lock) echo $lock; exit ;;
    --state) echo "$state"; exit ;;
esac
case $state in
    ready) exit ;;
    foreign) stop ".venv is not set-up's own (it has no mark of it), so it is left alone: move it" \
        "away or delete it, then try again." ;;
esac

# --- Making it ----------------------------------------------------------------------------------

mark() { echo "$build $*" >$stamp; }

# A tool that is interrupted may end as if it had failed, after which a shell would go on.
trap 'exit 130' INT TERM

uv=$(get_uv)
if ! has_packages; then
    case $build in gpu) needs="5.4 GB" ;; cpu) needs="1.4 GB" ;; esac
    if [ -n "${PYTHON:-}" ]; then
        "$PYTHON" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$python_version')" \
            2>/dev/null || stop "PYTHON=$PYTHON: must be a Python $python_version that runs."
    fi
    [ "$state" = "not made yet" ] ||
        say ".venv is $state, so it is made anew, without what you may have installed into it"
    mkdir -p .venv
    mark "$old_torch"
    find .venv -mindepth 1 -maxdepth 1 ! -name "${stamp#.venv/}" -exec rm -rf {} +
    "$uv" venv --quiet --allow-existing --python "${PYTHON:-$python_version}" .venv ||
        failed ".venv could not be made (uv takes a Python $python_version from this machine or" \
            "from GitHub; PYTHON=path names one)"
    if [ "$(uname)" = Linux ]; then
        for library in libgomp.so.1 libquadmath.so.0; do
            .venv/bin/python -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null ||
                stop "MXNet needs the system library $library: install libgomp1 and libquadmath0" \
                    "(Fedora: libgomp and libquadmath), then try again."
        done
    fi
    # Python compiles a module when it is first imported. Where it is told not to write the result
    # down, it would do so in every process, two seconds for MXNet alone: there it is done now.
    "$uv" pip install ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} \
        --python .venv/bin/python --require-hashes -r $lock ||
        failed "the packages could not be installed"
    # With this, `import helpers` works from any folder, so in every notebook's kernel.
    echo "$root" >.venv/lib/python$python_version/site-packages/many_devices.pth
fi
if [ "$torch" != none ]; then
    needs="up to 6 GB"
    mark "$old_torch"
    # Not in the lock: machines differ in the build that they want, with CUDA or without. pip reads
    # the settings with which a machine says where to look; uv has its own.
    "$uv" pip install --quiet --python .venv/bin/python pip &&
        .venv/bin/python -m pip install --disable-pip-version-check "torch==$torch_version" || {
        mark none "$made"
        failed "PyTorch could not be installed; all but chapters 13 to 20 works without"
    }
fi
mark $torch "$made"
say "ready: .venv, $(.venv/bin/python --version), MXNet's $build build, PyTorch: $torch"
