# shellcheck shell=bash
# Shared by scripts/quickstart and scripts/test: from a bare machine to .venv with hvdtrain, both frameworks and
# Horovod. Idempotent; what is there already is left alone, and an interrupted run is repaired by the next one.

TORCH=2.13.0
TENSORFLOW=2.21.0
# PyTorch's own index of CPU builds: PyPI has only the CUDA build for Linux, with gigabytes of libraries.
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
# What venv, frameworks, pip's cache and Horovod's build take together, with some air.
NEEDED_GB=7
VENV=.venv
STAMP=$VENV/.hvdtrain-ready

bold='' red='' plain=''
if [ -t 2 ] && [ -z "${NO_COLOR:-}" ]; then
    bold=$'\033[1m' red=$'\033[31m' plain=$'\033[0m'
fi

say() { printf '%s==>%s %s\n' "$bold" "$plain" "$*" >&2; }

die() {
    printf '%serror:%s %s\n' "$red" "$plain" "$1" >&2
    shift
    for line in "$@"; do printf '  %s\n' "$line" >&2; done
    exit 3
}

# pip and apt-get answer Ctrl-C with an exit status like any other, which must not count as a failure of theirs.
step_log=
trap 'rm -f "$step_log"; exit 130' INT

# step TEXT COMMAND...: run quietly, say how long it took; on failure show the end of the log and where it is.
step() {
    local text=$1 start=$SECONDS
    shift
    step_log=$(mktemp "${TMPDIR:-/tmp}/hvdtrain-setup-XXXXXX.log")
    say "$text ..."
    if "$@" >"$step_log" 2>&1; then
        rm -f "$step_log"
        say "$text: done in $((SECONDS - start)) s"
    else
        local status=$?
        tail -n 15 "$step_log" >&2
        die "$text failed (status $status)" "command: $*" "log: $step_log" \
            "What is done so far is kept: start again when the cause is removed."
    fi
}

# A GPU that can be used from here: a container has /proc/driver/nvidia of its host even where it was given no GPU.
has_gpu() {
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1
}

usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

# Sets `python` to $PYTHON or to the first suitable interpreter; to nothing where there is no Python at all.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if usable_python "$candidate"; then
            python=$(command -v "$candidate")
            return
        fi
    done
    python=
    ! command -v python3 >/dev/null || die "python3 is $(python3 --version 2>&1), and 3.10 to 3.13 are needed" \
        "install one of these and set PYTHON=/path/to/python3"
}

# $PYTHON, where it is set, must be what .venv has or will have.
check_python_choice() {
    local present
    [ -n "${PYTHON:-}" ] || return 0
    usable_python "$PYTHON" || die "PYTHON=$PYTHON isn't Python 3.10 to 3.13" "set it to one, or unset it"
    present=$(version_of "$VENV/bin/python") || return 0
    [ "$present" = "$(version_of "$PYTHON")" ] || die "$VENV has Python $present, and PYTHON=$PYTHON is another" \
        "unset PYTHON, or remove $VENV (rm -r $PWD/$VENV) and start again"
}

# missing_packages COMMAND=PACKAGE...: Debian packages of the commands that are missing, one per line.
missing_packages() {
    local pair
    for pair in "$@"; do
        command -v "${pair%%=*}" >/dev/null || echo "${pair#*=}"
    done
}

missing_python_packages() {
    local name
    if [ -z "$python" ]; then
        printf '%s\n' python3 python3-venv python3-dev
        return
    fi
    name=python$(version_of "$python" | cut -d. -f1-2)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$name-venv"
    "$python" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").is_file())' || echo "$name-dev"
}

# install_system_packages COMMAND=PACKAGE...: those for Python, Horovod's build and MPI, and these.
install_system_packages() {
    local needed wanted all
    find_python
    mapfile -t needed < <(missing_packages g++=g++ make=make "$@"; missing_python_packages)
    mapfile -t wanted < <(missing_packages mpirun=openmpi-bin mpicxx=libopenmpi-dev ssh=openssh-client)
    all=("${needed[@]}" "${wanted[@]}")
    [ ${#all[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        step "refreshing the package lists" apt-get update
        step "installing ${all[*]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends "${all[@]}"
        hash -r
        find_python
    else
        say "missing system packages: ${all[*]}"
        say "install them with: sudo apt-get update && sudo apt-get install -y ${all[*]}"
        [ ${#needed[@]} -eq 0 ] || die "can't go on without ${needed[*]}" "install the packages above and start again"
        say "going on without ${wanted[*]}: Horovod is built with what there is"
    fi
}

# What the environment in .venv is made from; when it changes, .venv is brought up to date.
fingerprint() {
    { cat pyproject.toml scripts/lib/setup.sh; pwd -P; version_of "$VENV/bin/python"; has_gpu && echo gpu; } |
        sha256sum | cut -d' ' -f1
}

# $STAMP has a line for each set of extras that is installed: more extras after the same ones will do as well.
is_set_up() { grep -q "^$(fingerprint) $1" "$STAMP" 2>/dev/null; }

# Whether .venv is whole, made here, and has a Python that will do.
venv_works() {
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && grep -qF "$PWD/$VENV" "$VENV/bin/activate" || return 1
    local version
    version=$(version_of "$VENV/bin/python")
    usable_python "$VENV/bin/python" || die "$VENV has Python $version, and 3.10 to 3.13 are needed" \
        "remove it (rm -r $PWD/$VENV) and start again"
}

make_venv() {
    local free
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
    if [ "$free" -lt "$NEEDED_GB" ]; then
        die "$free GB free in $PWD, about $NEEDED_GB GB needed" "free some space and start again"
    fi
    step "making $VENV with Python $(version_of "$python")" "$python" -m venv --clear "$VENV"
}

pip_install() { PIP_USER=0 "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

install_torch() {
    if has_gpu; then
        pip_install "torch==$TORCH"
    else
        # First from what pip is configured with (a mirror, a folder of wheels), then from PyTorch's index.
        pip_install "torch==$TORCH+cpu" || pip_install "torch==$TORCH+cpu" --extra-index-url "$TORCH_CPU_INDEX"
    fi
}

install_tensorflow() {
    if has_gpu; then
        pip_install "tensorflow[and-cuda]==$TENSORFLOW"
    elif [ "$(uname -m)" = x86_64 ]; then
        pip_install "tensorflow-cpu==$TENSORFLOW"
    else
        pip_install "tensorflow==$TENSORFLOW"
    fi
}

# set_up EXTRAS [COMMAND=PACKAGE...]: everything up to a Horovod that is proved to work.
set_up() {
    local extras=$1 done_before
    shift
    check_python_choice
    is_set_up "$extras" && return
    # Two at once would break each other's .venv. The folder itself is the lock, and ends with this process.
    exec 9<.
    flock -n 9 || { say "waiting for another set-up in this folder"; flock 9 || true; }
    if ! is_set_up "$extras"; then
        install_system_packages "$@"
        venv_works || make_venv
        step "installing PyTorch $TORCH" install_torch
        step "installing TensorFlow $TENSORFLOW" install_tensorflow
        step "installing hvdtrain" pip_install -e ".[$extras]"
        "$VENV/bin/hvdtrain" horovod build || exit 3
        done_before=$(grep "^$(fingerprint) " "$STAMP" 2>/dev/null) || true
        printf '%s\n' ${done_before:+"$done_before"} "$(fingerprint) $extras" >"$STAMP"
    fi
    exec 9<&-
}
