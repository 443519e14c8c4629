#!/usr/bin/env bash
# Everything that CI checks, on a fresh machine with Python and g++: lint, formats, types, and all tests.
#
#   bash scripts/test.sh                 all of it
#   bash scripts/test.sh tests/test_cache.py -k limit    only these tests; arguments go to pytest
#   bash scripts/test.sh tests/npu/test_device.py        tests that need torch_npu, under the simulator
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/requirements.sh
bash scripts/setup_venv.sh "${TEST_REQUIREMENTS[@]}" --no-deps "${TEST_REQUIREMENTS_NO_DEPS[@]}"

# Never into .venv: an installed torch-npu breaks `import torch` where there is no CANN. Tests of tests/npu run it on
# the simulator; others compile our declarations against its headers.
torch_npu="$PWD/.venv/torch_npu"
if [[ ! -d "$torch_npu/torch_npu/include/acl" ]]; then
  echo "[test] installing torch-npu==2.13.0 beside .venv's packages" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$torch_npu" torch-npu==2.13.0
fi
export NPU_PROMPT_CACHE_ACL_INCLUDE="$torch_npu/torch_npu/include"

on_simulator() {
  PYTHONPATH="$torch_npu" .venv/bin/python -m npu_prompt_cache.sim run --devices 2 -- .venv/bin/pytest "$@"
}

if (($# == 0)); then
  echo "[test] ruff, clang-format, mypy" >&2
  .venv/bin/ruff check .
  .venv/bin/ruff format --check --quiet .
  git ls-files -z 'csrc/*.h' 'csrc/*.cpp' | xargs -0 .venv/bin/clang-format --dry-run -Werror
  .venv/bin/mypy
  echo "[test] all tests, and beside them tests/npu with torch_npu on the simulator, whose output comes last" >&2
  output="$(mktemp)"
  on_simulator tests/npu >"$output" 2>&1 &
  beside=$!
  trap 'kill "$beside" 2>/dev/null || true; rm -f "$output"' EXIT
  status=0
  .venv/bin/pytest || status=$?
  wait "$beside" || status=$?
  cat "$output"
  exit "$status"
elif [[ " $*" == *" tests/npu"* ]]; then
  on_simulator "$@"
else
  .venv/bin/pytest "$@"
fi
