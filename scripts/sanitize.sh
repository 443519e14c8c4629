#!/usr/bin/env bash
# The tests of the C++ code under AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   bash scripts/sanitize.sh                      all tests of the core and the simulator
#   bash scripts/sanitize.sh tests/test_cache.py  some of them
#
# Builds a second copy of the package in build/sanitized; the one in .venv stays as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/requirements.sh
bash scripts/setup_venv.sh "${TEST_REQUIREMENTS[@]}" --no-deps "${TEST_REQUIREMENTS_NO_DEPS[@]}"

echo "[sanitize] building with -fsanitize=address,undefined" >&2
NPU_PROMPT_CACHE_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1" \
  .venv/bin/python setup.py --quiet build --build-lib build/sanitized --build-temp build/sanitized-objects

tests=("$@")
((${#tests[@]})) || tests=(tests --ignore=tests/npu --ignore=tests/ops --ignore=tests/test_demo.py --ignore=tests/test_package.py
  --ignore=tests/test_sim_run.py)

# Python itself is not instrumented, so the runtime must come first; libstdc++ with it, for its exceptions. Leaks are
# not looked for: the interpreter leaks on purpose at exit (tests count the simulator's allocations instead).
preload="$(gcc -print-file-name=libasan.so):$(gcc -print-file-name=libstdc++.so)"
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  PYTHONPATH="$PWD/build/sanitized" .venv/bin/pytest -q -p no:cacheprovider "${tests[@]}"
