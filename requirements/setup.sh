#!/bin/sh
# Makes or updates .venv, the one environment that everything in the course runs in.
#
#   sh requirements/setup.sh                 does nothing when .venv is up to date
#   TORCH=1 sh requirements/setup.sh         the same, and PyTorch in it
#   GPU=1 sh requirements/setup.sh           MXNet's build for GPUs, with CUDA's libraries: 4 GB;
#                                            GPU=0: that for CPUs; without: as this machine has it
#   PYTHON=/path/to/python3.11 sh requirements/setup.sh    with this Python
#
# These change nothing, and print what it would use or has found; `make doctor` asks them:
#   sh requirements/setup.sh --find-lock     the lock
#   sh requirements/setup.sh --find-python   the Python 3.11
#   sh requirements/setup.sh --find-any      a Python from 3.8 on
#   sh requirements/setup.sh --find-uv       the uv
#   sh requirements/setup.sh --find-maker    without a uv: the Python that would fetch one
#   sh requirements/setup.sh --find-room     MB that the environment takes
#   sh requirements/setup.sh --state         a word for the state of .venv, and what follows from it
# And this one fetches uv first where there is none:
#   sh requirements/setup.sh --get-uv
#
# Needs no root. Outside this folder it writes to the caches of uv and pip, to the system's folder
# for temporary files, and, where it fetches a Python, to uv's folder for those. It removes an
# environment only if it made it.
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

# --- What went wrong: one sentence, and after it the words of the tool that failed --------------

# Runs a command. Where it fails: what was to be done, who says why, then the command.
attempt() {
    what=$1 who=$2
    shift 2
    status=0
    words=$("$@" 2>&1) || status=$?
    [ $status = 0 ] || explain
    [ -z "$words" ] || printf '%s\n' "$words" >&2
}

# Runs a command, and says what it fetches or builds while that goes on: hundreds of megabytes came
# without a sign of life otherwise. What else it said is in `words`, and its status in `status`.
aloud() {
    status=0
    words=$({ (exec "$@" 2>&1) || echo "$ended $?"; } 2>/dev/null | while IFS= read -r line; do
        case $line in
            *Downloading\ *.metadata*) ;;   # pip's, some kilobytes each
            *Downloading\ * | *Building\ *) printf '  %s\n' "${line#"${line%%[! ]*}"}" >&2 ;;
            *) printf '%s\n' "$line" ;;
        esac
    done)
    case $words in
        *"$ended "*)
            status=${words##*"$ended "}
            words=${words%"$ended "*}
            words=${words%"$newline"} ;;
    esac
}
ended="set-up: the command ended with"
newline='
'
way_out=   # what else one can do, where a step has another way

# Stops with the reason, told by the words of uv, pip or the system: the system's numbers for "no
# space" are 28 and 122 (a quota), for "no permission" 1, 13 and 30 (mounted read-only).
explain() {
    case $words in
        *"os error 28)"* | *"Errno 28]"* | *"No space left"* | \
        *"os error 122)"* | *"Errno 122]"* | *"quota exceeded"*)
            why="no space is left ($(free_space)); $needs" ;;
        *incomplete-download* | *IncompleteRead*)   # pip takes a full disk for that, too
            why="the download broke off, by the network or for want of space ($(free_space));"
            why="$why $needs" ;;
        *certificate* | *CERTIFICATE*)
            why="the package index, or a proxy before it, shows a certificate that is not trusted"
            why="$why here: SSL_CERT_FILE can name a file with the right one" ;;
        *"dns error"* | *"client error (Connect)"* | *"error sending request"* | \
        *"connection broken by"* | *ProxyError* | *ConnectionError* | *"timed out"* | \
        *"onnection refused"* | *"onnection reset"* | *"etwork is unreachable"*)
            why="there is no network, or none that leads there: check it, then try again$way_out" ;;
        *"os error 13)"* | *"Errno 13]"* | *"Permission denied"* | *"os error 1)"* | \
        *"Errno 1]"* | *"os error 30)"* | *"Errno 30]"* | *"Read-only file system"*)
            why=$(not_writable) ;;
        *"matching platform tag"*)
            why="there is a package of which this kind of machine ($(uname -sm)) has no build" ;;
        *"ownloads are set to 'never'"* | *"ownloads are set to 'manual'"*)
            why="uv's settings forbid it: change them$way_out" ;;
        *"HTTP status"* | *" not found in the package registry"* | *"No matching distribution"*)
            why="the package index answers, but does not hand out what is asked of it" ;;
        "") why="$who ended with status $status and without a word" ;;
        *) why="set-up can't tell why; what $who says may" ;;
    esac
    say "$what: $why."
    if [ -n "$words" ]; then
        echo "$who says:" >&2
        printf '%s\n' "$words" | tail -n 12 | sed 's/^/    /' >&2   # pip's may be a traceback
    fi
    exit 1
}

# Stops before anything is written where the disk can't hold the environment. Where uv's cache is on
# the same disk, .venv shares its files: what is there already takes no space again.
check_disk() {
    cache=$(uv_folder cache)
    free=$(megabytes_free "$root")
    [ "${free:-$room}" -lt "$room" ] || return 0
    if [ -d "$cache" ] && [ "$(disk_of "$cache")" = "$(disk_of "$root")" ]; then
        say "$free MB are free in $root, and $needs. It can do with less only where uv's cache," \
            "$cache, has the packages already."
    else
        stop "$free MB are free in $root, and $needs: free some, or put the course elsewhere." \
            "Nothing was changed."
    fi
}
megabytes_free() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print int($4 * 1.024e-3) }'; }
disk_of() { df -Pk "$1" 2>/dev/null | awk 'NR == 2 { print $1 }'; }

free_space() {
    between="free: "
    for folder in "$root" "$(uv_folder cache)" "${TMPDIR:-/tmp}"; do
        folder=$(existing "$folder")
        free=$(megabytes_free "$folder")
        printf '%s%s MB in %s' "$between" "${free:-0}" "$folder"
        between=", "
    done
}

not_writable() {
    for folder in "$root" "$root/.venv" "$root/build"; do
        if [ -e "$folder" ] && ! [ -w "$folder" ]; then
            echo "you may not write to $folder: change its owner or permissions, or put the" \
                "course elsewhere"
            return
        fi
    done
    for kind in cache python; do
        folder=$(uv_folder $kind)
        [ -w "$(existing "$folder")" ] && continue
        [ $kind = cache ] && name=UV_CACHE_DIR || name=UV_PYTHON_INSTALL_DIR
        echo "you may not write to uv's $folder: let $name name another folder"
        return
    done
    echo "you may not write to a file or a folder, or not run a program"
}

# Where uv keeps its cache, or its Pythons.
uv_folder() {
    "${uv:-uv}" "$1" dir 2>/dev/null || echo "${UV_CACHE_DIR:-${HOME:-}/.cache/uv}"
}

# The nearest folder above $1 that is there.
existing() {
    path=$1
    while [ ! -e "$path" ]; do
        case $path in */*) path=${path%/*} ;; *) path=. ;; esac
        [ -n "$path" ] || path=/
    done
    printf '%s\n' "$path"
}

write() { printf '%s\n' "$1" | tee "$2" >/dev/null; }
record() { attempt "$2 could not be written" "The system" write "$1" "$2"; }

# --- What is on this machine --------------------------------------------------------------------

# Prints the first Python for which the expression $1 is true. Each one is run, since a name on
# the PATH proves nothing: a version manager leaves launchers there for Pythons it doesn't have.
first_python() {
    if [ -n "${PYTHON:-}" ] && try_python "$PYTHON" "$1"; then return; fi
    old_ifs=$IFS; IFS=:
    for folder in $PATH; do
        IFS=$old_ifs
        for python in "$folder/python$python_version" "$folder/python3" "$folder/python" \
            "$folder"/python3.[0-9] "$folder"/python3.[0-9][0-9]; do
            try_python "$python" "$1" && return
        done
    done
    IFS=$old_ifs
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
" 2>/dev/null) && [ -x "$found" ] && printf '%s\n' "$found"
}

find_python() {
    right="'%d.%d' % sys.version_info[:2] == '$python_version'"
    if [ -n "${PYTHON:-}" ]; then
        try_python "$PYTHON" "$right" ||
            stop "PYTHON=$PYTHON: must be a Python $python_version that runs, or not be set."
    else
        first_python "$right"
    fi
}

# Not one in .venv, which may be about to be made anew.
find_uv() {
    for uv in "$(command -v uv)" build/uv/bin/uv; do
        case $uv in */.venv/bin/uv | .venv/bin/uv) continue ;; esac
        if "$uv" --version >/dev/null 2>&1; then printf '%s\n' "$uv"; return; fi
    done
    return 1
}

# Not every Python can make an environment: Debian ships ensurepip as a package of its own.
find_maker() { first_python "sys.version_info >= (3, 8) and __import__('ensurepip')"; }

get_uv() {
    if find_uv; then return; fi
    if ! python=$(find_maker); then
        python=$(first_python "sys.version_info >= (3, 8)") &&
            stop "uv could not be fetched: $python has no venv module (Debian and Ubuntu:" \
                "apt install python3-venv). Install that, or uv, then try again."
        stop "there is no Python $python_version here and no uv to fetch one: install one of" \
            "them, then try again."
    fi
    echo "Fetching uv $uv_version into build/uv" >&2
    attempt "build/uv could not be made" Python "$python" -m venv --clear build/uv
    attempt "uv could not be fetched" pip \
        build/uv/bin/python -m pip install --quiet "uv==$uv_version"
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
made_from() { [ "$(cat $stamp 2>/dev/null)" = "$root $(cksum <"$1")" ]; }
usable_gpu() {
    python=$(first_python "sys.version_info >= (3, 8)") && "$python" helpers/gpu.py 2>/dev/null
}

# --- The state of .venv -------------------------------------------------------------------------

# The stamp marks an environment as made here. It is the first file in it, so whatever else is
# there without it is somebody's own; only an empty folder can be either, and holds nothing to lose.
# When all is done it says what .venv was made from, and where: an environment that was moved with
# its repository holds the old place in its scripts. Before anything is changed it says
# "unfinished", so what is left of a set-up that was killed is made anew.
state() {
    if made; then
        echo "ready"
    elif [ -L .venv ]; then
        echo "foreign .venv is a symbolic link, which set-up never makes, and is left alone:" \
            "remove the link, then try again."
    elif [ ! -e .venv ] || { [ -d .venv ] && [ -z "$(ls -A .venv 2>&1)" ]; }; then
        echo "absent"
    elif [ ! -d .venv ]; then
        echo "foreign .venv is a file, which set-up never makes, and is left alone: move it away" \
            "or delete it, then try again."
    elif [ -f $stamp ]; then
        case $(cat $stamp) in
            "$wanted") echo "broken the Python of .venv doesn't run any more" ;;
            "$root "*) echo "outdated .venv was made from another list of packages" ;;
            /*) echo "moved .venv was made when this folder had another path" ;;
            *) echo "unfinished .venv was not finished the last time" ;;   # or it says nothing yet
        esac
    else
        echo "foreign .venv does not have set-up's mark, so it may be somebody's own, and is left" \
            "alone: move it away or delete it, then try again."
    fi
}
made() { [ "$(cat $stamp 2>/dev/null)" = "$wanted" ] && .venv/bin/python -c "" 2>/dev/null; }
torch_made() { [ "$(cat .venv/.torch 2>/dev/null)" = $torch_version ]; }
ready() { made && { [ "${TORCH:-0}" != 1 ] || torch_made; }; }

case ${1:-} in
    --find-lock) choose_lock; exit ;;
    --find-python) find_python; exit ;;
    --find-any) first_python "sys.version_info >= (3, 8)"; exit ;;
    --find-uv) find_uv; exit ;;
    --find-maker) find_maker; exit ;;
    --get-uv) get_uv; exit ;;
esac
lock=$(choose_lock)
wanted="$root $(cksum <$lock)"
case $lock in
    *gpu*) fetches="3 GB" room=5400
        needs="the environment takes 1.4 GB, and CUDA's libraries 4 GB more" ;;
    *) fetches="400 MB" room=1400 needs="the environment takes 1.4 GB" ;;
esac
case ${1:-} in
    --find-room) echo $room; exit ;;
    --state) state; exit ;;
    "") ;;
    *) stop "there is no option $1; the first lines of requirements/setup.sh name them." ;;
esac
case $root in
    *:*) stop "the path $root has a colon, which the PATH to programs in it can't hold: move the" \
        "course to a folder without one." ;;
esac
if ready; then exit; fi

# --- Making it ----------------------------------------------------------------------------------

# One set-up at a time: the second waits, and finds it done. (Macs have no flock.)
exec 9<requirements/setup.sh
if command -v flock >/dev/null && ! flock -n 9; then
    say "waiting for another set-up of this folder to end"
    flock 9
    if ready; then exit; fi
fi

state=$(state)
case $state in foreign*) stop "${state#* }" ;; esac
# Chosen once, it stays too, also when a set-up that makes .venv anew is killed.
with_torch=${TORCH:-0} unfinished=unfinished
if [ -e .venv/.torch ] || [ "$(cat $stamp 2>/dev/null)" = "unfinished, had PyTorch" ]; then
    with_torch=1 unfinished="unfinished, had PyTorch"
fi

made || check_disk
if ! made; then
    failure=".venv could not be made"
    python=$(find_python) || {
        [ -z "${PYTHON:-}" ] || exit 1
        python=$python_version   # uv fetches one of its own
        failure="no Python $python_version was found, and uv could not fetch one"
        no_python=". uv fetches it from GitHub. Other ways: install Python $python_version (Debian 12:"
        no_python="$no_python apt install python3.11-venv); or take conda's (conda create -p py311"
        no_python="$no_python python=3.11, then make setup PYTHON=py311/bin/python); or let"
        no_python="$no_python UV_PYTHON_INSTALL_MIRROR name a copy of uv's Pythons"
    }
fi
uv=$(get_uv)
case $(uv_folder cache) in
    *'$'*)   # setuptools, which builds the one package that has no wheel, stumbles over it
        say "uv's cache, $(uv_folder cache), has a \$ in its path, where not all packages can be" \
            "built, so it is not used"
        export UV_NO_CACHE=1 ;;
esac
if ! made; then
    case $state in
        absent) ;;
        unfinished*) say "${state#* }, so it is made anew" ;;
        *) say "${state#* }, so it is made anew, without what you may have installed into it" ;;
    esac
    [ -d .venv ] || attempt ".venv could not be made" "The system" mkdir .venv
    record "$unfinished" $stamp
    for each in .venv/* .venv/.[!.]* .venv/..?*; do
        if [ "$each" != $stamp ] && { [ -e "$each" ] || [ -L "$each" ]; }; then
            attempt "the old .venv could not be removed" "The system" rm -rf "$each"
        fi
    done
    way_out=${no_python:-}
    attempt "$failure" uv "$uv" venv --quiet --allow-existing --python "$python" .venv
    way_out=
    if [ "$(uname)" = Linux ]; then
        for library in libgomp.so.1 libquadmath.so.0; do
            .venv/bin/python -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null ||
                stop "MXNet needs the system library $library: install libgomp1 and libquadmath0" \
                    "(Fedora: libgomp and libquadmath), then try again."
        done
    fi
    echo "Installing the packages: up to $fetches to fetch" >&2
    # Python compiles a module when it is first imported. Where it is told not to write the result
    # down, it would do so in every process, two seconds for MXNet alone: there it is done now.
    aloud "$uv" pip install ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} \
        --python .venv/bin/python --require-hashes -r $lock
    if [ $status != 0 ]; then
        what="the packages could not be installed" who=uv
        explain
    fi
    # With this, `import helpers` works from any folder, so in every notebook's kernel.
    site=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    record "$root" "$site/many_devices.pth"
    [ "$with_torch" = 1 ] || record "$wanted" $stamp
fi
if [ "$with_torch" = 1 ] && ! torch_made; then
    needs="PyTorch takes up to 6 GB"
    record "$unfinished" $stamp
    # Not in the lock: machines differ in the build that they want, with CUDA or without. pip reads
    # the settings with which a machine says where to look; uv has its own.
    echo "Installing PyTorch" >&2
    status=0 who=uv
    words=$("$uv" pip install --quiet --python .venv/bin/python pip 2>&1) && who=pip || status=$?
    [ $status != 0 ] || aloud .venv/bin/python -m pip install --disable-pip-version-check \
        --progress-bar off --root-user-action ignore "torch==$torch_version"
    if [ $status != 0 ]; then
        # pip fetches everything before it installs anything: mostly, nothing has changed.
        .venv/bin/python -c "
import sys
from importlib.util import find_spec
sys.exit(find_spec('torch') is not None)" && write "$wanted" $stamp 2>/dev/null
        what="PyTorch could not be installed (all but chapters 13 to 16 works without)"
        explain
    fi
    record $torch_version .venv/.torch
    record "$wanted" $stamp
fi
case $lock in *gpu*) for=", MXNet for GPUs" ;; *) for= ;; esac
echo "Ready: .venv, $(.venv/bin/python --version)$for" >&2
