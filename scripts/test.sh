#!/usr/bin/env bash
# Everything that CI checks, on a fresh machine with Python and g++: lint, formats, types, and all tests.
#
#   bash scripts/test.sh                 all of it
#   bash scripts/test.sh tests/test_cache.py -k limit    only these tests; arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/requirements.sh
bash scripts/setup_venv.sh "${TEST_REQUIREMENTS[@]}" --no-deps "${TEST_REQUIREMENTS_NO_DEPS[@]}"

# The vendor's headers, to compile ours against. Never into .venv: an installed torch-npu without CANN breaks torch.
headers=.venv/torch_npu
if [[ ! -d "$headers/torch_npu/include/acl" ]]; then
  echo "[test] installing torch-npu==2.13.0 beside .venv's packages, for its headers" >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$headers" torch-npu==2.13.0
fi
export NPU_PROMPT_CACHE_ACL_INCLUDE="$PWD/$headers/torch_npu/include"

if (($# == 0)); then
  echo "[test] ruff, clang-format, mypy" >&2
  .venv/bin/ruff check .
  .venv/bin/ruff format --check --quiet .
  git ls-files -z 'csrc/*.h' 'csrc/*.cpp' | xargs -0 .venv/bin/clang-format --dry-run -Werror
  .venv/bin/mypy
fi
exec .venv/bin/pytest "$@"
