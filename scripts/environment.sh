# Sourced by the other scripts: makes .venv in the repository and installs kvcoord with the extra that is asked for.
# Safe to interrupt (what was half made is made again) and to run twice (what is up to date is left alone).

unset CDPATH PYTHONPATH PYTHONHOME
repository="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$repository/.venv"
venv_python="$venv/bin/python"

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0 PIP_NO_INPUT=1

say() { printf '%s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

is_recent_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in python3.11 python3 python3.12 python3.13; do
        if command -v "$candidate" >/dev/null && is_recent_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "kvcoord needs Python 3.11 or newer, and neither python3.11 nor python3 on PATH is that: install it first"
}

# The mark lies in the folder until the first installation is over, so an interrupted one is recognised and redone.
unfinished="$venv/.unfinished"

make_venv() {
    local python
    if [[ -e "$venv" && ! -e "$unfinished" ]]; then
        is_recent_python "$venv_python" || fail "$venv has no Python 3.11 or newer: remove that folder and start again"
        return
    fi
    python="$(find_python)"
    say "making $venv with $python"
    rm -rf -- "$venv"
    mkdir -- "$venv"
    touch -- "$unfinished"
    "$python" -m venv "$venv" ||
        fail "$python cannot make a virtual environment: install its venv module (python3-venv on Debian and Ubuntu)"
}

# What the installation depends on: requirements, the interpreter, and the place that an editable install points to.
requirements_checksum() {
    {
        cat -- "$repository/pyproject.toml" "$repository/constraints.txt"
        "$venv_python" -VV
        printf '%s\n' "$repository"
    } | cksum
}

install_kvcoord() {
    local extra="$1" stamp="$venv/.installed-$1" checksum started_s=$SECONDS
    checksum="$(requirements_checksum)"
    if [[ -e "$stamp" && "$(<"$stamp")" == "$checksum" ]]; then
        return
    fi
    say "installing kvcoord[$extra] and what it needs into $venv (the first time takes some minutes)"
    local pip=("$venv_python" -m pip install --quiet --constraint "$repository/constraints.txt")
    "${pip[@]}" setuptools
    "${pip[@]}" --no-build-isolation --editable "$repository[$extra]"
    printf '%s\n' "$checksum" >"$stamp"
    rm -f -- "$unfinished"
    say "installed in $((SECONDS - started_s)) s"
}

# prepare_environment EXTRA: afterwards $venv/bin has kvcoord with the dependencies of that extra.
prepare_environment() {
    exec 9<"$repository/pyproject.toml"
    if command -v flock >/dev/null; then
        flock 9
    fi
    make_venv
    install_kvcoord "$1"
    exec 9<&-
}
