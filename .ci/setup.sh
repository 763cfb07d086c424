#!/bin/sh
# Makes what a make target needs, and nothing when it is there:   sh .ci/setup.sh PART...
#
#   demo         .venv with MindSpore and this package
#   test         .venv with the pinned pair MindSpore 2.9.0 + MindSpore Transformers 1.9.0 and the checkers
#   smoke        .venv-210 with MindSpore 2.10.0
#   prometheus   the program `prometheus`, where the system's packages can give it
#   prometheus!  the same, and it is an error when it is not to be had
#
# A stamp in each environment holds the sum of what it was made from, so that the next call returns at once.
set -eu
cd "$(dirname "$0")/.."

QUIET=--quiet
[ -t 2 ] && QUIET= # the wheels have gigabytes: on a terminal, show how they come
PYTHON_WANTED='>=3.10,<3.13' # MindSpore 2.9 and 2.10 have no wheels for other versions

say() { printf 'set-up: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }
can_install_packages() { [ "$(id -u)" = 0 ] && have apt-get; }

install_packages() {
    say "apt-get install $*"
    mkdir -p .cache
    if ! {
        apt-get -o DPkg::Lock::Timeout=300 update &&
            DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
    } >.cache/apt.log 2>&1; then
        tail -n 5 .cache/apt.log >&2
        return 1
    fi
}

# --- uv -------------------------------------------------------------------------------------------------------------

find_uv() {
    UV=uv
    uv --version >/dev/null 2>&1 && return
    UV=.cache/uv/bin/uv
    "$UV" --version >/dev/null 2>&1 && return
    say "there is no uv on PATH: it is installed into .cache/uv"
    mkdir -p .cache
    if ! have python3 && can_install_packages; then install_packages python3-venv ca-certificates || true; fi
    have python3 || fail "python3 is missing: install it (Debian, Ubuntu: apt-get install python3-venv), or uv, and run again"
    uv_by_venv || uv_by_pip || uv_by_package ||
        fail "uv cannot be installed: install python3-venv (Debian, Ubuntu: apt-get install python3-venv), or uv, and run again"
}
uv_by_venv() {
    rm -rf .cache/uv
    python3 -m venv .cache/uv >/dev/null 2>&1 && .cache/uv/bin/python -m pip install --quiet uv
}
uv_by_pip() { # Debian and Ubuntu without python3-venv
    rm -rf .cache/uv
    python3 -m pip --version >/dev/null 2>&1 && python3 -m pip install --quiet --target .cache/uv uv
}
uv_by_package() {
    can_install_packages && install_packages python3-venv && uv_by_venv
}

# --- environments ---------------------------------------------------------------------------------------------------

sum_of_sources() { { pwd && cat pyproject.toml .ci/setup.sh; } | cksum; }
is_ready() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.ready-$2" 2>/dev/null)" = "$(sum_of_sources)" ]; }

environment() { # DIRECTORY STAMP REQUIREMENT...
    directory=$1
    stamp=$2
    shift 2
    is_ready "$directory" "$stamp" && return
    find_uv
    if [ ! -x "$directory/bin/python" ]; then
        rm -rf "$directory"
        "$UV" venv --quiet --python "$PYTHON_WANTED" "$directory" ||
            fail "MindSpore has wheels for Python 3.10 to 3.12 only; none was found, and uv could not fetch one"
    fi
    say "$directory: $*"
    # shellcheck disable=SC2086 # one word or none
    "$UV" pip install $QUIET --python "$directory/bin/python" "$@"
    require_libraries "$directory/bin/python"
    sum_of_sources >"$directory/.ready-$stamp"
}

require_libraries() { # MindSpore's wheel takes the OpenMP runtime from the system; small images do not have it
    "$1" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null && return
    if can_install_packages && install_packages libgomp1; then return; fi
    fail "MindSpore needs the library libgomp.so.1: install it (Debian, Ubuntu: apt-get install libgomp1) and run again"
}

# --- Prometheus -----------------------------------------------------------------------------------------------------

find_prometheus() {
    have prometheus && have promtool && return
    can_install_packages && install_prometheus && have prometheus
}

install_prometheus() ( # the package's service is not wanted: it is neither started now nor at the next boot
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        trap 'rm -f "$policy"' EXIT
        trap 'exit 130' INT TERM HUP
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    install_packages prometheus || exit 1
    if [ -d /run/systemd/system ]; then systemctl --quiet disable prometheus.service || true; fi
)

warn_of_old_prometheus() {
    version=$(prometheus --version 2>&1 | sed -n 's/^prometheus, version \([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    # shellcheck disable=SC2086 # two words on purpose
    set -- ${version:-0 0}
    if [ "$1" -lt 2 ] || { [ "$1" = 2 ] && [ "$2" -lt 42 ]; }; then
        say "prometheus $1.$2 is older than 2.42, the oldest that is supported: some of what follows may fail"
    fi
}

# --------------------------------------------------------------------------------------------------------------------

for part in "$@"; do
    case $part in
    demo) is_ready .venv test || environment .venv demo -e '.[demo,secure]' ;;
    test) environment .venv test -e '.[dev,secure,mindformers]' ;;
    smoke) environment .venv-210 smoke -e '.[dev,demo]' 'mindspore==2.10.0' ;;
    prometheus) find_prometheus && warn_of_old_prometheus || true ;;
    prometheus!)
        find_prometheus ||
            fail "the tests need Prometheus 2.42 or newer: install it (Debian, Ubuntu: apt-get install prometheus), or put \`prometheus\` and \`promtool\` on PATH, and run again"
        warn_of_old_prometheus
        ;;
    *) fail "unknown part '$part'" ;;
    esac
done
