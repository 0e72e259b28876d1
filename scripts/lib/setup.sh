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

# step TEXT COMMAND...: run quietly, say how long it took; on failure show the end of the log and where it is.
step() {
    local text=$1 start=$SECONDS log
    shift
    log=$(mktemp "${TMPDIR:-/tmp}/hvdtrain-setup-XXXXXX.log")
    say "$text ..."
    if "$@" >"$log" 2>&1; then
        rm -f "$log"
        say "$text: done in $((SECONDS - start)) s"
    else
        local status=$?
        tail -n 15 "$log" >&2
        die "$text failed (status $status)" "command: $*" "log: $log"
    fi
}

has_gpu() {
    [ -d /proc/driver/nvidia/gpus ] && [ -n "$(ls -A /proc/driver/nvidia/gpus 2>/dev/null)" ]
}

usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        if usable_python "$candidate"; then
            PYTHON=$(command -v "$candidate")
            return
        fi
    done
    PYTHON=
}

# Debian packages that are missing, one per line. Arguments: more commands to look for, as command=package.
missing_packages() {
    local pair
    for pair in g++=g++ make=make mpirun=openmpi-bin mpicxx=libopenmpi-dev ssh=openssh-client "$@"; do
        command -v "${pair%%=*}" >/dev/null || [ -x "/usr/sbin/${pair%%=*}" ] || echo "${pair#*=}"
    done
    if [ -z "$PYTHON" ]; then
        printf '%s\n' python3 python3-venv python3-dev
    else
        "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || echo "$(python_package)-venv"
        "$PYTHON" -c 'import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").is_file())' || echo "$(python_package)-dev"
    fi
}

python_package() { "$PYTHON" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'; }

# install_system_packages [command=package...]
install_system_packages() {
    local missing
    find_python
    mapfile -t missing < <(missing_packages "$@")
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        step "refreshing the package lists" apt-get update
        step "installing ${missing[*]}" env DEBIAN_FRONTEND=noninteractive \
            apt-get install -y --no-install-recommends "${missing[@]}"
        hash -r
        find_python
    else
        say "missing system packages: ${missing[*]}"
        say "install them with: sudo apt-get update && sudo apt-get install -y ${missing[*]}"
        if [ -z "$PYTHON" ] || ! command -v g++ >/dev/null || ! command -v make >/dev/null; then
            die "a C++ compiler, make and Python 3.10 to 3.13 are needed" "install the packages above and start again"
        fi
    fi
    [ -n "$PYTHON" ] || die "no Python 3.10 to 3.13 found" "set PYTHON=/path/to/python3"
}

# What the environment in .venv is made from; when it changes, .venv is brought up to date. $STAMP has one line for
# each set of extras that is installed, so that scripts/test and scripts/quickstart don't undo each other's.
fingerprint() {
    { cat pyproject.toml scripts/lib/setup.sh; "$VENV/bin/python" -VV; has_gpu && echo gpu; echo "$1"; } 2>/dev/null |
        sha256sum | cut -d' ' -f1
}

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

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"; }

# set_up EXTRAS [command=package...]: everything up to a Horovod that is proved to work.
set_up() {
    local extras=$1 free
    shift
    if grep -qxF "$(fingerprint "$extras")" "$STAMP" 2>/dev/null; then
        return
    fi
    install_system_packages "$@"
    free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1048576)}')
    if [ ! -x "$VENV/bin/pip" ] && [ "$free" -lt "$NEEDED_GB" ]; then
        die "$free GB free in $PWD, about $NEEDED_GB GB needed" "free some space and start again"
    fi
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        step "making $VENV with $("$PYTHON" --version)" "$PYTHON" -m venv --clear "$VENV"
    fi
    step "installing PyTorch $TORCH" install_torch
    step "installing TensorFlow $TENSORFLOW" install_tensorflow
    step "installing hvdtrain" pip_install -e ".[$extras]"
    "$VENV/bin/hvdtrain" horovod build
    fingerprint "$extras" >>"$STAMP"
}
