"""The demo from end to end: load, run, check, report."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from npu_prompt_cache.demo import model, plot, report, run
from npu_prompt_cache.demo.checks import check
from npu_prompt_cache.demo.figures import Settings


def main(
    settings: Settings,
    *,
    threads: int | None,
    output: Path,
    json_file: Path | None,
    json_to_stdout: bool,
) -> int:
    """Runs the demo and reports. Returns the exit status: 0 only if every check holds.

    Args:
        settings: what to run.
        threads: threads that torch computes with; None leaves its own choice.
        output: folder for the plot and the JSON; made if needed.
        json_file: where to write the JSON too.
        json_to_stdout: print the JSON, and nothing else, on stdout.

    Raises:
        DemoError: the model or the pool is not to be had; the message says what to do.
    """
    output.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    model.quiet_transformers()
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = model.load(settings.device)
    result = run.run(loaded.model, loaded.tokenizer, settings)
    checks = check(result)

    figures = json.dumps(report.as_json(result, checks, model.NAME), indent=2, ensure_ascii=False) + "\n"
    plot_file, default_json_file = output / "demo.png", output / "demo.json"
    for file in filter(None, (default_json_file, json_file)):
        file.write_text(figures, encoding="utf-8")
    plot.plot(result, plot_file)

    if json_to_stdout:
        sys.stdout.write(figures)
    else:
        print(report.as_text(result, checks, model.NAME))
        print(f"\nPlot  {plot_file}\nJSON  {json_file or default_json_file}")
    for failed in (one for one in checks if not one.holds):
        print(f"npu-prompt-cache: FAILED: {failed.claim}: {failed.found}", file=sys.stderr)
    return 0 if all(one.holds for one in checks) else 1
