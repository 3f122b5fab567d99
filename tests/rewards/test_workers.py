"""Processes that judge answers: limits, confinement, and that what one answer breaks stays with it."""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sdpo.rewards import workers

MODULE = """
import os, time
state = []
def warm_up():
    pass
def judge(item):
    return eval(item)
"""


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """`judge_all` of a module that evaluates its items."""
    (tmp_path / "evaluating.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def judge_items(*items, level=None, **settings):
        level = level or workers.fork_level()
        return workers.judge_all("evaluating", items, **{"seconds": 1, "num_workers": 4, "level": level, **settings})

    yield judge_items
    workers._servers.pop((os.getpid(), "evaluating"), None)


confined = pytest.mark.skipif(workers.fork_level() is None, reason="no way to confine a process works here")


def test_verdicts_come_back_in_order_whatever_each_takes(judge):
    items = ["time.sleep(0.3) or 1", "1 / 0", "os._exit(0)", "'x' * 100_000", "{'a': [1, None]}", "{1}", "4"]
    verdicts = judge(*items)
    assert [verdict.value for verdict in verdicts] == [1, None, None, None, {"a": [1, None]}, None, 4]
    assert [verdict.problem for verdict in verdicts] == [None, "error", "crash", "crash", None, "crash", None]
    assert verdicts[1].detail == "ZeroDivisionError: division by zero"


def test_time_and_memory_are_limited(judge, monkeypatch):
    start = time.monotonic()
    endless, large = judge("[0 for _ in iter(int, 1)]", "len(bytearray(4 << 30))")
    assert endless.problem == "time"
    assert large.problem == "error" and large.detail.startswith("MemoryError")
    monkeypatch.setattr(workers, "_CLOCK_FACTOR", 2)
    asleep, power = judge("time.sleep(99)", "9**9**9**9")
    assert asleep.problem == "time" and power.problem == "time"
    assert time.monotonic() - start < 30


def test_the_limit_is_of_the_processors_time(judge):
    # Asleep for 1.5 s of a limit of 1 s.
    assert judge("time.sleep(1.5) or 1")[0].value == 1


def test_what_an_answer_breaks_breaks_with_it(judge):
    breaks = "[state.append(1), globals().update(judge=None), __builtins__.update(eval=None), len(state)][-1]"
    assert [verdict.value for verdict in judge(breaks, breaks, "len(state)", num_workers=1)] == [1, 1, 0]


def test_an_answer_cannot_speak_for_another_or_hear_the_next(judge):
    writes = "[os.write(fd, b'\\x06{\"value\": 7}') for fd in range(1, 3)]"
    reads = "os.read(0, 9) == b''"
    opened = "[fd for fd in range(4, 64) if os.path.exists(f'/proc/self/fd/{fd}')]"
    deep = "os.write(3, b'{\"value\": ' + b'[' * 5000 + b']' * 5000 + b'}') and os._exit(0)"
    verdicts = judge("5", writes, reads, opened, deep, "5", level="limited")
    assert [verdict.value for verdict in verdicts] == [5, [13, 13], True, [], None, 5]


@confined
def test_an_answer_can_neither_write_nor_start_nor_connect(judge, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("alive")
    actions = [
        f"open({str(victim)!r}, 'w')",
        f"os.remove({str(victim)!r})",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "__import__('socket').socket()",
        f"os.kill({os.getpid()}, 0)",
    ]
    verdicts = judge(*actions)
    assert {verdict.problem for verdict in verdicts} == {"error"}
    assert {verdict.detail.split(":")[0] for verdict in verdicts} <= {
        "PermissionError",
        "OSError",
        "FileNotFoundError",
    }
    assert victim.read_text() == "alive" and not (tmp_path / "new").exists()


@pytest.mark.skipif(workers.fork_level() != "contained", reason="needs Landlock")
def test_an_answer_cannot_read_the_files_of_the_user_or_the_environment(judge, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.chmod(tmp_path, 0o755)
    read, environment = judge(f"open({str(secret)!r}).read()", "'SECRET_KEY' in os.environ")
    assert read.problem == "error" and "PermissionError" in read.detail
    assert environment.value is False


def test_a_process_that_cannot_be_confined_is_an_error_and_no_verdict(judge, monkeypatch):
    whole = workers.sandbox._confinement
    broken = {"landlock": ["/"], "limits": {}}
    monkeypatch.setattr(workers.sandbox, "_confinement", lambda *a: {**whole(*a), **broken, "seccomp": "00"})
    with pytest.raises(RuntimeError, match="could not be confined"):
        judge("1", level="limited")


def test_a_server_that_ended_is_started_again(judge):
    assert judge("1")[0].value == 1
    workers._servers[os.getpid(), "evaluating"].process.kill()
    workers._servers[os.getpid(), "evaluating"].process.wait()
    assert judge("2")[0].value == 2


def test_the_server_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "evaluating.py").write_text(MODULE)
    program = "from sdpo.rewards import workers\nimport os\n"
    program += "workers.judge_all('evaluating', ['1'], seconds=1, level='limited')\n"
    program += "print(workers._servers[os.getpid(), 'evaluating'].process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    pid = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout
    end = time.monotonic() + 5
    while Path(f"/proc/{pid.strip()}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert pid.strip() and not Path(f"/proc/{pid.strip()}").exists()


def test_a_module_that_cannot_be_imported_is_an_error():
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        workers.judge_all("no_such_module", [1], seconds=1, level="limited")


def test_an_import_loads_no_heavy_package():
    program = "import sdpo.rewards, sdpo.rewards.workers, sys\n"
    program += (
        "print(*(name for name in ('torch', 'transformers', 'sympy', 'datasets', 'httpx2') if name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_optional_packages_are_imported_where_they_are_used():
    optional = {"math_verify", "latex2sympy2_extended", "sympy", "reasoning_gym", "py3langid", "httpx2", "openai"}
    files = list(Path(workers.__file__).parent.glob("*.py"))
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not optional & {name.split(".")[0] for name in names}, file
    assert len(files) > 10


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    from sdpo.rewards import JudgeReward, attempts, instruction_reward, math_reward, reasoning_gym_dataset

    monkeypatch.setattr(attempts, "find_spec", lambda name: None)
    language = [{"id": "language:response_language", "kwargs": {"language": "en"}}]
    for extra, call in (
        ("math", lambda: math_reward(["Q"], ["1"], answer=["1"])),
        ("instructions", lambda: instruction_reward(["Q"], ["x"], instructions=[language])),
        ("reasoning_gym", lambda: reasoning_gym_dataset("chain_sum", 1)),
        ("judge", lambda: JudgeReward("http://127.0.0.1:1/v1", "m")),
    ):
        with pytest.raises(ImportError, match=rf"pip install 'sdpo\[{extra}\]'"):
            call()
