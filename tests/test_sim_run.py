"""Programs on the simulator: ``python -m npu_prompt_cache.sim``, ``sim.activate`` and the pytest plugin.

What does not import torch_npu runs with an empty package of that name; the rest needs the wheel, which scripts/test.sh
installs to a folder of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from npu_prompt_cache import sim

INCLUDE = os.environ.get("NPU_PROMPT_CACHE_ACL_INCLUDE", "")
LIB = Path(sim.library_path()).parent
SITE = LIB.parent / "site"
OURS = ("NPU_PROMPT_CACHE_SIM", "LD_LIBRARY_PATH", "PYTHONPATH", "ASCEND_")

needs_torch_npu = pytest.mark.skipif(not INCLUDE, reason="torch-npu is not installed; scripts/test.sh installs it")

# Noise of torch_npu's own, on hardware too.
EXPECTED_ON_STDERR = ("32 padding size", "ASCEND_HOME_PATH environment variable is not set")


def environment(**changes: str) -> dict[str, str]:
    """The environment without traces of a simulator, and `changes`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OURS)} | changes


@pytest.fixture
def fake_npu(tmp_path: Path) -> Path:
    """A folder with a torch_npu that is there and can do nothing."""
    package = tmp_path / "fake" / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('the fake torch_npu was imported')\n")
    return package.parent


@pytest.fixture
def real_npu() -> Path:
    return Path(INCLUDE).parent.parent


def python(*arguments: str, cwd: Path | None = None, **changes: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    env = environment(OMP_NUM_THREADS="1", **changes)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False, cwd=cwd)


def run(npu: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """``sim run`` with these arguments and torch_npu of that folder."""
    changes["PYTHONPATH"] = os.pathsep.join([str(npu), *filter(None, [changes.get("PYTHONPATH")])])
    return python("-m", "npu_prompt_cache.sim", "run", *arguments, **changes)


def program(code: str) -> list[str]:
    return ["--", sys.executable, "-c", textwrap.dedent(code)]


SHOW_ENVIRONMENT = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"


def environment_under_run(npu: Path, *options: str, **changes: str) -> dict[str, str]:
    done = run(npu, *options, *program(SHOW_ENVIRONMENT), **changes)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)[0]
    return found


# The program and its exit


@pytest.mark.parametrize("code", [0, 1, 7, 200])
def test_the_exit_status_is_the_programs(fake_npu: Path, code: int) -> None:
    assert run(fake_npu, *program(f"raise SystemExit({code})")).returncode == code


def test_a_signal_is_the_programs(fake_npu: Path) -> None:
    done = run(fake_npu, *program("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == -signal.SIGKILL


def test_the_program_gets_its_arguments_as_they_are(fake_npu: Path) -> None:
    show = ["-c", "import sys; print(sys.argv[1:])", "--devices", "5", "--", "a b", ""]
    expected = "['--devices', '5', '--', 'a b', '']\n"
    assert run(fake_npu, "--devices", "2", "--", sys.executable, *show).stdout == expected
    assert run(fake_npu, "--devices", "2", sys.executable, *show).stdout == expected


def test_input_and_both_outputs_are_the_programs(fake_npu: Path) -> None:
    command = [sys.executable, "-m", "npu_prompt_cache.sim", "run", "--", "sh", "-c", "cat; echo wrong >&2"]
    env = environment(PYTHONPATH=str(fake_npu))
    done = subprocess.run(command, env=env, input="in", capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("in", "wrong\n")


# What it inherits


def test_the_libraries_and_the_hook_come_first_and_the_rest_stays(fake_npu: Path) -> None:
    found = environment_under_run(fake_npu, LD_LIBRARY_PATH="/one:/two", ASCEND_HOME_PATH="/cann", KEPT="1")
    assert found["LD_LIBRARY_PATH"] == f"{LIB}:/one:/two"
    assert found["PYTHONPATH"] == f"{SITE}:{fake_npu}"
    assert found["NPU_PROMPT_CACHE_SIM"] == "1"
    assert found["KEPT"] == "1"
    assert "ASCEND_HOME_PATH" not in found


def test_the_machine_is_asked_for_by_variables(fake_npu: Path) -> None:
    found = environment_under_run(fake_npu, "--devices", "3", "--hbm-gb", "1.5", "--late-streams", "9")
    asked = {name: value for name, value in found.items() if name.startswith("NPU_PROMPT_CACHE_SIM_")}
    assert asked == {
        "NPU_PROMPT_CACHE_SIM_DEVICES": "3",
        "NPU_PROMPT_CACHE_SIM_HBM_BYTES": str(3 << 29),
        "NPU_PROMPT_CACHE_SIM_LATE_STREAMS": "9",
    }


def test_a_run_inside_a_run_adds_what_it_asks_for(fake_npu: Path) -> None:
    inner = ["--", sys.executable, "-m", "npu_prompt_cache.sim", "run", "--devices", "2"]
    found = environment_under_run(fake_npu, "--devices", "3", "--hbm-gb", "2", *inner, LD_LIBRARY_PATH="/one")
    assert found["LD_LIBRARY_PATH"] == f"{LIB}:/one"
    assert found["PYTHONPATH"] == f"{SITE}:{fake_npu}"
    assert found["NPU_PROMPT_CACHE_SIM_DEVICES"] == "2"
    assert found["NPU_PROMPT_CACHE_SIM_HBM_BYTES"] == str(2 << 30)


def test_an_empty_entry_of_a_path_is_the_folder_it_was_in(fake_npu: Path, tmp_path: Path) -> None:
    show = program("import os; print(os.environ['PYTHONPATH'], os.environ['LD_LIBRARY_PATH'])")
    paths = {"PYTHONPATH": f"{fake_npu}::/a", "LD_LIBRARY_PATH": "/b:"}
    done = python("-m", "npu_prompt_cache.sim", "run", *show, cwd=tmp_path, **paths)
    assert done.stdout == f"{SITE}:{fake_npu}:{tmp_path}:/a {LIB}:/b:{tmp_path}\n", done.stderr
    empty = environment_under_run(fake_npu, LD_LIBRARY_PATH="")
    assert empty["LD_LIBRARY_PATH"] == str(LIB)


def test_our_libraries_are_found_before_a_real_runtime(fake_npu: Path, tmp_path: Path) -> None:
    cann = tmp_path / "cann"
    cann.mkdir()
    (cann / "other.c").write_text("int aclInit(const char* p) { return p != 0; }\n")
    for name in ("libascendcl.so", "libhccl.so", "libopapi.so"):
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(cann / name), str(cann / "other.c")]
        subprocess.run(command, check=True)
    code = """
        import ctypes
        for name in ("libascendcl.so", "libhccl.so", "libopapi.so"):
            assert ctypes.CDLL(name).npcSimFunctionCount() > 0, name
    """
    done = run(fake_npu, *program(code), LD_LIBRARY_PATH=str(cann))
    assert done.returncode == 0, done.stderr


def test_a_sitecustomize_of_the_users_still_runs(fake_npu: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['CUSTOMIZED'] = __name__ + ' ' + __file__\n")
    found = environment_under_run(fake_npu, PYTHONPATH=str(tmp_path))
    assert found["CUSTOMIZED"] == f"sitecustomize {tmp_path / 'sitecustomize.py'}"


def test_other_programs_are_not_burdened(fake_npu: Path) -> None:
    code = (
        "import sys; print([name for name in ('torch', 'npu_prompt_cache', 'ctypes', 'numpy') if name in sys.modules])"
    )
    assert run(fake_npu, *program(code)).stdout == "[]\n"


def test_an_interpreter_that_lacks_the_package_finds_it(fake_npu: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    other = str(tmp_path / "venv" / "bin" / "python")
    code = "from npu_prompt_cache import sim; print(sim.library_path())"
    assert python("-c", code, PYTHONPATH="").stdout == f"{sim.library_path()}\n"
    done = run(fake_npu, "--", other, "-c", code)
    assert done.stdout == f"{sim.library_path()}\n", done.stderr


# What is wrong with the command


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--devices", "0"], "devices=0 is not in [1, 1024]"),
        (["--devices", "1025"], "devices=1025 is not in [1, 1024]"),
        (["--devices", "two"], "--devices"),
        (["--hbm-gb", "0"], "hbm_gb=0.0"),
        (["--hbm-gb", "-1"], "hbm_gb=-1.0"),
        (["--hbm-gb", "nan"], "hbm_gb=nan"),
        (["--hbm-gb", "inf"], "hbm_gb=inf"),
        (["--late-streams", "-1"], "late_streams=-1"),
        (["--late-streams", str(1 << 64)], "late_streams=18446744073709551616"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_wrong_value_is_named(fake_npu: Path, options: list[str], named: str) -> None:
    done = run(fake_npu, *options, *program("print('ran')"))
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--"], ["--devices", "2"], ["--devices", "2", "--"]])
def test_a_run_of_nothing_is_an_error(fake_npu: Path, arguments: list[str]) -> None:
    done = run(fake_npu, *arguments)
    assert done.returncode == 2
    assert "CMD is missing" in done.stderr


def test_a_program_that_is_not_there_or_cannot_run_is_named(fake_npu: Path, tmp_path: Path) -> None:
    done = run(fake_npu, "--", "no-such-program", "x")
    assert (done.returncode, done.stderr) == (
        127,
        "python -m npu_prompt_cache.sim: error: cannot run 'no-such-program': No such file or directory\n",
    )
    (tmp_path / "plain").write_text("text")
    done = run(fake_npu, "--", str(tmp_path / "plain"))
    assert done.returncode == 126
    assert "plain': Permission denied" in done.stderr


@pytest.mark.parametrize("arguments", [["run", "--", "true"], ["ops"]])
def test_without_torch_npu_it_says_how_to_install_it(arguments: list[str]) -> None:
    done = python("-m", "npu_prompt_cache.sim", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install --no-deps --target DIR torch-npu==2.13.0" in done.stderr
    assert "PYTHONPATH=DIR" in done.stderr


def test_a_torch_npu_in_the_current_folder_is_not_on_the_programs_path(fake_npu: Path) -> None:
    command = ["-m", "npu_prompt_cache.sim", "run", *program("print('ran')")]
    done = python(*command, cwd=fake_npu)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no torch_npu on the path" in done.stderr
    for path in (":", str(fake_npu), f"{fake_npu}:"):
        done = python(*command, cwd=fake_npu, PYTHONPATH=path)
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "words"), [((), ("run", "ops")), (("run",), ("example: ", "CMD")), (("ops",), ("example: ",))]
)
def test_help_helps(command: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = python("-m", "npu_prompt_cache.sim", *command, "--help")
    assert done.returncode == 0
    assert [word for word in words if word not in done.stdout] == []


def test_starting_a_program_imports_no_torch() -> None:
    code = "import sys, npu_prompt_cache.sim.command; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    assert python("-c", code).stdout == "[]\n"


# Programs that import torch_npu


def clean(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is on stderr besides torch_npu's ordinary warnings."""
    return [line for line in done.stderr.splitlines() if not any(text in line for text in EXPECTED_ON_STDERR)]


COPY = """
    import torch, torch_npu
    x = torch.empty(4, device="npu")
    x.copy_(torch.arange(4.0))
"""


@needs_torch_npu
def test_a_program_runs_and_only_it_prints(real_npu: Path) -> None:
    code = COPY + "    print(torch.npu.device_count(), (x * 2).cpu().tolist(), torch.npu.mem_get_info()[1])\n"
    done = run(real_npu, "--devices", "2", "--hbm-gb", "3", *program(code))
    assert (done.returncode, done.stdout, clean(done)) == (0, f"2 [0.0, 2.0, 4.0, 6.0] {3 << 30}\n", [])


ENDS = {
    "exit": ("raise SystemExit(3)", 3, ""),
    "exception": ("raise ValueError('of the program')", 1, "ValueError: of the program"),
    "_exit": ("import os; os._exit(4)", 4, ""),
    "thread": ("import threading; threading.Thread(target=lambda: [x.cpu() for _ in range(50)]).start()", 0, ""),
    "queued": ("x.copy_(torch.ones(4).pin_memory(), non_blocking=True)", 0, ""),
    "alive": ("import sys; sys.keep = [torch.npu.Stream(), torch.npu.Event(), x.cpu().pin_memory()]", 0, ""),
}


@needs_torch_npu
@pytest.mark.parametrize(("end", "late"), [*((end, False) for end in ENDS), ("thread", True), ("queued", True)])
def test_a_program_ends_well(real_npu: Path, end: str, late: bool) -> None:
    line, code, last = ENDS[end]
    done = run(real_npu, *(["--late-streams", "1"] if late else []), *program(COPY + f"    {line}\n"))
    assert done.returncode == code, done.stderr
    said = clean(done)
    assert said[-1:] == ([last] if last else [])
    assert [text for text in said if "Exception ignored" in text or "terminate" in text] == []


SPAWN = """
    import concurrent.futures, multiprocessing

    def work():
        import torch
        x = torch.full((3,), 2.0, device="npu:1")
        return torch.npu.device_count(), (x + 1).cpu().tolist()

    if __name__ == "__main__":
        {start}
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as children:
            print(*children.submit(work).result())
"""


@needs_torch_npu
@pytest.mark.parametrize("way", ["run", "activate"])
def test_spawned_children_run_on_it_too(real_npu: Path, tmp_path: Path, way: str) -> None:
    start = "import torch" if way == "run" else "from npu_prompt_cache import sim; sim.activate(devices=2)"
    script = tmp_path / "spawn.py"
    script.write_text(textwrap.dedent(SPAWN.format(start=start)))
    if way == "run":
        done = run(real_npu, "--devices", "2", "--", sys.executable, str(script))
    else:
        done = python(str(script), PYTHONPATH=str(real_npu))
    assert (done.returncode, done.stdout) == (0, "2 [3.0, 3.0, 3.0]\n"), done.stderr


@needs_torch_npu
def test_a_bad_variable_is_named_by_torch_npus_error(real_npu: Path) -> None:
    done = run(real_npu, *program(COPY), NPU_PROMPT_CACHE_SIM_DEVICES="many")
    assert done.returncode == 1
    assert "NPU_PROMPT_CACHE_SIM_DEVICES='many' is no whole number in [1, 1024]" in done.stdout + done.stderr


# The library alone: it needs no torch_npu.
COUNT = """
    import ctypes
    acl = ctypes.CDLL("libascendcl.so")
    acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
    count = ctypes.c_uint32()
    code = acl.aclrtGetDeviceCount(ctypes.byref(count))
    print(count.value if code == 0 else (code, acl.aclGetRecentErrMsg().decode()))
"""


@pytest.mark.parametrize(("value", "count"), [("", 4), ("0,1", 2), ("3", 1), ("2,0,1", 3), ("0,1,2,3", 4)])
def test_a_program_sees_the_visible_devices(fake_npu: Path, value: str, count: int) -> None:
    done = run(fake_npu, "--devices", "4", *program(COUNT), ASCEND_RT_VISIBLE_DEVICES=value)
    assert (done.returncode, done.stdout) == (0, f"{count}\n"), done.stderr


@pytest.mark.parametrize(
    "value", ["4", "0,4", "-1", "0,", ",0", "0,,1", "0;1", "0 1", "0, 1", "all", "1,1", "99999999999999999999"]
)
def test_visible_devices_that_cannot_be_are_named(fake_npu: Path, value: str) -> None:
    done = run(fake_npu, "--devices", "4", *program(COUNT), ASCEND_RT_VISIBLE_DEVICES=value)
    assert done.stdout.startswith("(100000, ")
    assert f"ASCEND_RT_VISIBLE_DEVICES='{value}' is no list of different devices in [0, 3]" in done.stdout


@needs_torch_npu
def test_torch_npu_sees_the_visible_devices(real_npu: Path) -> None:
    code = "import torch; print(torch.npu.device_count(), torch.ones(2, device='npu:1').device)"
    done = run(real_npu, "--devices", "4", *program(code), ASCEND_RT_VISIBLE_DEVICES="3,1")
    assert (done.returncode, done.stdout) == (0, "2 npu:1\n"), done.stderr
    active = "from npu_prompt_cache import sim; sim.activate(devices=4); " + code
    done = python("-c", active, PYTHONPATH=str(real_npu), ASCEND_RT_VISIBLE_DEVICES="3,1")
    assert (done.returncode, done.stdout) == (0, "2 npu:1\n"), done.stderr


@needs_torch_npu
def test_the_operators_are_listed(real_npu: Path) -> None:
    done = python("-m", "npu_prompt_cache.sim", "ops", PYTHONPATH=str(real_npu))
    assert done.returncode == 0, done.stderr
    served = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert len(served) > 1000
    assert served["aten::mm"] == "aten kernel"
    assert served["npu::npu_rms_norm"] == "reference"


# In a process that runs already


@needs_torch_npu
def test_activation_makes_torch_npu_run(real_npu: Path) -> None:
    code = """
        from npu_prompt_cache import sim
        sim.activate(devices=2, hbm_gb=1.5, late_streams=3)
        import torch
        x = torch.arange(4.0, device="npu:1") * 2
        print(torch.npu.device_count(), torch.npu.mem_get_info(1)[1], x.cpu().tolist())
        assert sim.memory(1).live_allocations == 1
    """
    done = python("-c", textwrap.dedent(code), PYTHONPATH=str(real_npu))
    assert (done.returncode, done.stdout) == (0, f"2 {3 << 29} [0.0, 2.0, 4.0, 6.0]\n"), done.stderr
    assert clean(done) == []


@needs_torch_npu
def test_activation_is_early_enough_where_torch_came_without_torch_npu(real_npu: Path) -> None:
    code = """
        import torch
        from npu_prompt_cache import sim
        sim.activate()
        import torch_npu
        print((torch.ones(1).npu() + 1).cpu())
    """
    done = python("-c", textwrap.dedent(code), PYTHONPATH=str(real_npu), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (0, "tensor([2.])\n"), done.stderr


@needs_torch_npu
def test_activation_after_torch_npu_is_an_error(real_npu: Path) -> None:
    code = """
        import torch
        from npu_prompt_cache import sim
        try:
            sim.activate()
        except RuntimeError as error:
            print(error)
    """
    assert run(real_npu, *program(code)).stdout.startswith("torch_npu is imported already: call activate() before it")


def test_activation_beside_another_runtime_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text("int aclInit(const char* p) { return p != 0; }\n")
    other = tmp_path / "libascendcl.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(other), str(tmp_path / "other.c")], check=True)
    code = f"""
        import ctypes
        from npu_prompt_cache import sim
        ctypes.CDLL({str(other)!r})
        try:
            sim.activate()
        except RuntimeError as error:
            print(error)
    """
    assert (
        python("-c", textwrap.dedent(code)).stdout == f"{other} is loaded already: one process has one Ascend runtime\n"
    )


@pytest.mark.parametrize("wrong", [{"devices": 0}, {"hbm_gb": 0.0}, {"late_streams": -1}])
def test_activation_of_a_machine_that_cannot_be_changes_nothing(wrong: dict[str, int]) -> None:
    before, libraries = dict(os.environ), Path("/proc/self/maps").read_text().count("libascendcl.so")
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sim.activate(**wrong)  # type: ignore[arg-type]
    assert dict(os.environ) == before
    assert Path("/proc/self/maps").read_text().count("libascendcl.so") == libraries


# The pytest plugin

SUITE = """
    import torch, torch_npu

    def test_there_are_two_devices():
        assert torch.npu.device_count() == 2
        assert torch.npu.mem_get_info()[1] == 1 << 30
        assert (torch.ones(2, device="npu:1") * 3).cpu().tolist() == [3.0, 3.0]
"""


@needs_torch_npu
def test_the_plugin_runs_a_test_suite(real_npu: Path, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import torch\n")
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(SUITE))
    options = ["-p", "npu_prompt_cache.sim.pytest_plugin", "--sim-devices", "2", "--sim-hbm-gb", "1"]
    done = python("-m", "pytest", "-q", *options, str(tmp_path), cwd=tmp_path, PYTHONPATH=str(real_npu))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_plugin_names_a_wrong_value(tmp_path: Path) -> None:
    options = ["-p", "npu_prompt_cache.sim.pytest_plugin", "--sim-devices", "0"]
    done = python("-m", "pytest", *options, str(tmp_path), cwd=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "devices=0 is not in [1, 1024]" in done.stderr
