#!/usr/bin/env bash
# The demo, on a machine with Python and g++: sets .venv up and runs `npu-prompt-cache demo` with the arguments.
#
#   bash scripts/demo.sh
#   bash scripts/demo.sh --customers 2 --turns 3
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/scripts/requirements.sh"
bash "$root/scripts/setup_venv.sh" "${DEMO_REQUIREMENTS[@]}" --no-deps "${DEMO_REQUIREMENTS_NO_DEPS[@]}"
# From here, not from the root: paths in the arguments are the caller's.
exec "$root/.venv/bin/npu-prompt-cache" demo "$@"
