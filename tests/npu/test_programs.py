"""The programs that people run on ``npu:0``: the demo and the smoke test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600, cwd=ROOT)


def test_the_demo_has_the_same_table_and_answers_as_on_the_cpu(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "npu:0"):
        quick = ("--customers", "2", "--turns", "2", "--new-tokens", "12", "--threads", "1")
        done = run("-m", "npu_prompt_cache.cli", "demo", "--device", device, *quick, "--output", str(tmp_path / device))
        assert done.returncode == 0, done.stdout + done.stderr
        figures = json.loads((tmp_path / device / "demo.json").read_text())
        assert figures["settings"]["device"] == device
        found[device] = [
            {name: value for name, value in request.items() if "_ms_" not in name and name != "speedup"}
            for request in figures["requests"]
        ]
        assert figures["totals"]["cached_tokens"] > 1500
    assert found["cpu"] == found["npu:0"]


def test_smoke_test_reports_that_all_is_well(tmp_path: Path) -> None:
    done = run("scripts/npu_smoke.py", "--output", str(tmp_path / "report.md"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert report == done.stdout
    assert "FAILED" not in report
    assert report.count("| ok |") == 33
    assert "| 600 tokens, cache, 500 tokens hit |" in report


def test_smoke_test_says_what_failed() -> None:
    done = run("scripts/npu_smoke.py", "--device", "npu:77")
    assert done.returncode == 1
    assert "| torch_npu and the runtime load | **FAILED** " in done.stdout
    assert "Traceback" in done.stdout
