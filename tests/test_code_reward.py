"""Programs against tests: verdicts, feedback, and what hostile programs must not be able to do."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from sdpo.rewards import CodeReward, Limits, RewardScorer, code_reward, isolation_level, sandbox, verdict
from sdpo.rewards.code import extract_code
from sdpo.types import Completion, Rollout

CASES = [{"input": [1, 2], "output": 3}, {"input": [0, 9], "output": 9}]
ADD = {"type": "functional", "fn_name": "add", "tests": CASES}
ECHO = {"type": "stdin", "tests": [{"input": "1 2\n", "output": "3\n"}]}
GOOD_ADD = "def add(a, b):\n    return a + b"
GOOD_SUM = "print(sum(map(int, input().split())))"
QUICK = Limits(seconds=1.0, memory=256 << 20, output=1 << 16)


def block(program):
    return f"Here it is.\n```python\n{program}\n```\nDone."


def score(program, tests=ADD, **settings):
    function = CodeReward(**{"limits": QUICK, **settings})
    [result] = function(prompts=["Q"], completions=[block(program)], completion_ids=[[1]], tests=[tests])
    return result


LEVELS = [level for level in sandbox.LEVELS[:-1] if sandbox._works(level)]
pytestmark = pytest.mark.skipif(not LEVELS, reason="no way to confine programs works here")


def test_programs_are_confined_where_the_tests_run():
    assert isolation_level() == LEVELS[0]


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tests", [ADD, json.dumps(ADD)])
@pytest.mark.parametrize(
    "program",
    [
        GOOD_ADD,
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
        "def add(a: List[int], b: Optional[int]):  # names of typing are there\n    print('noise')\n    return a + b",
    ],
)
def test_a_right_function_has_reward_1_and_no_feedback(program, tests):
    assert score(program, tests) == (1.0, None)


@pytest.mark.parametrize(
    "program",
    [
        GOOD_SUM,
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)",
        "print(sum(map(int, open(0).read().split())), '  \\n\\n')",
        "import threading\ndef main():\n    print(3)\nthreading.Thread(target=main).start()",
        "def main():\n    print(3)\nif __name__ == '__main__':\n    main()",
    ],
)
def test_a_right_program_has_reward_1(program):
    assert score(program, ECHO) == (1.0, None)


def test_long_input_and_output_pass():
    text = "7\n" * 200_000
    tests = {"type": "stdin", "tests": [{"input": text, "output": text}]}
    program = "import sys\nsys.stdout.write(sys.stdin.read())"
    assert score(program, tests, limits=Limits(seconds=5)).reward == 1.0


def test_attempts_run_at_once_and_come_back_in_order():
    programs = ["import time\ntime.sleep(0.4)\n" + GOOD_ADD, "def add(a, b): return 0", GOOD_ADD, ""]
    function = CodeReward(num_workers=4, limits=QUICK)
    start = time.monotonic()
    scores = function(["Q"] * 4, [block(p) for p in programs], [[1]] * 4, tests=[ADD] * 4)
    assert [s.reward for s in scores] == [1.0, 0.0, 1.0, 0.0]
    assert time.monotonic() - start < 4 * 0.8


def test_the_share_of_tests_is_a_reward_where_it_is_asked_for():
    wrong = "def add(a, b):\n    return 9"
    assert score(wrong).reward == 0.0
    graded = score(wrong, reward="fraction")
    assert graded.reward == 0.5 and "Your Output:\n9\nExpected:\n3" in graded.feedback


def test_hidden_tests_count_when_asked_for_and_are_never_shown():
    tests = {**ADD, "tests": [ADD["tests"][0], {"input": [4242, 1], "output": 4243, "hidden": True}]}
    for body in (
        "return 3",
        "raise ValueError(a) if a > 9 else a",
        "while a > 9: pass",
    ):
        program = f"def add(a, b):\n    if a == 1: return 3\n    {body}\n    return 3"
        assert score(program, tests) == (1.0, None)
        counted = score(program, tests, use_hidden=True)
        assert counted.reward == 0.0 and counted.feedback.endswith("on a hidden test.")
        assert "424" not in counted.feedback
    with pytest.raises(ValueError, match="tests of row 0: no test counts"):
        score(GOOD_ADD, {**ADD, "tests": tests["tests"][1:]})


def test_a_row_without_tests_has_no_reward_and_wrong_columns_are_errors():
    assert score(GOOD_ADD, None).reward is None
    with pytest.raises(ValueError, match="no column 'tests'"):
        code_reward(["Q"], ["x"], [[1]])
    for wrong in ("{", {"type": "x"}, {**ADD, "fn_name": None}, {**ADD, "tests": [{"input": 1, "output": 1}]}):
        with pytest.raises(ValueError, match="tests of row 0"):
            score(GOOD_ADD, wrong)


def test_it_is_a_reward_function_of_strings_and_of_chats():
    scorer = RewardScorer(
        code_reward,
        reward_weights=None,
        chat_template_kwargs={},
        model_init_kwargs=None,
        trust_remote_code=False,
        device="cpu",
    )
    state = type("State", (), {"global_step": 0})
    for prompt in ("Q", [{"role": "user", "content": "Q"}]):
        rollout = Rollout(0, prompt, [1], Completion([1], is_truncated=False), block(GOOD_ADD))
        [row] = scorer.score([rollout], [{"prompt": prompt, "tests": ADD}], trainer_state=state)
        assert row.rewards == {"code_reward": 1.0}


@pytest.mark.parametrize(
    ("answer", "expected", "is_same"),
    [
        (1, 1, True),
        (True, 1, False),
        (2, 2.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1, 2], [1, 2, 3], False),
        ({"a": None}, {"a": None}, True),
        ({"a": 1}, {"b": 1}, False),
        (10**400, 1.0, False),
    ],
)
def test_values_are_equal_when_types_are(answer, expected, is_same):
    assert verdict.same_value(answer, expected, tolerance=1e-6) is is_same


@pytest.mark.parametrize(
    ("answer", "expected", "is_same"),
    [
        ("a \nb\n\n", "a\nb", True),
        ("a\n\nb", "a\nb", False),
        ("0.3333333", "0.33333333333", True),
        ("nan", "0.5", False),
        ("3.0", "3", False),
        ("1e999999", "1.0", False),
    ],
)
def test_texts_are_equal_by_lines_and_fractions_within_tolerance(answer, expected, is_same):
    assert verdict.same_text(answer, expected, tolerance=1e-6) is is_same


@pytest.mark.parametrize("output", [b"", b"1 2", b"\xff", b"[" * 100_000, b"9" * 10_000])
def test_what_is_no_value_is_said_to_be_none(output):
    with pytest.raises(verdict.NoValue):
        verdict.parse(output)


@pytest.mark.parametrize(
    ("text", "code", "is_fenced"),
    [
        ("```python\na\n```\n```py\nb\n```\n```\nc\n```", "b\n", True),
        ("```\na\n```", "a\n", True),
        ("```bash\nls\n```\nx", "```bash\nls\n```\nx", False),
        ("~~~python\na\n~~~", "a\n", True),
        ("```python\ncut off", "cut off", True),
        ("print(1)", "print(1)", False),
    ],
)
def test_the_last_python_block_is_the_program(text, code, is_fenced):
    assert extract_code(text) == (code, is_fenced)


# --- feedback --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "tests", "parts"),
    [
        ("def add(a, b):\n    return a - b", ADD, ["Wrong Answer\nInput:\n1\n2\nYour Output:\n-1\nExpected:\n3"]),
        ("print(4)", ECHO, ["Wrong Answer\nInput:\n1 2\nYour Output:\n4\nExpected:\n3"]),
        ("def add(a, b):\n    return a +", ADD, ['Syntax Error\n  File "solution.py", line 2', "SyntaxError: "]),
        (
            "def add(a, b):\n    return a / 0",
            ADD,
            [
                "Runtime Error\n",
                "line 2, in add\n    return a / 0",
                "ZeroDivisionError: division by zero\nLast Input:\n1\n2",
            ],
        ),
        (
            "import sys\nprint(3)\nsys.exit(3)",
            ECHO,
            ["Runtime Error: the program ended with exit code 3\nLast Input:"],
        ),
        ("while True: pass", ECHO, ["Time Limit Exceeded", "Last Input:\n1 2"]),
        ("x = [0] * 10**9", ECHO, ["Memory Limit Exceeded\nLast Input:"]),
        ("while True: print('x' * 999)", ECHO, ["Output Limit Exceeded"]),
        ("def sub(a, b): return 3", ADD, ["Runtime Error", "'add'"]),
        ("def add(a, b): return {1, 2}", ADD, ["returned a set, which JSON has no word for"]),
        (" ", ADD, ["Format Error: there is no code."]),
    ],
)
def test_feedback_says_what_went_wrong(program, tests, parts):
    reward, feedback = score(program, tests)
    assert reward == 0.0
    for part in parts:
        assert part in feedback
    assert "sandbox" not in feedback and "<string>" not in feedback


def test_prose_is_a_format_error():
    [result] = code_reward(["Q"], ["I do not know."], [[1]], tests=[ADD])
    assert result.reward == 0.0 and result.feedback.startswith("Format Error: no ```python code block")


def test_feedback_keeps_to_its_budget():
    tests = {"type": "stdin", "tests": [{"input": "1" * 5000, "output": "2" * 5000}]}
    for program in ("print('3' * 5000)", "raise ValueError('4' * 5000)"):
        feedback = score(program, tests, max_feedback=500).feedback
        assert 200 < len(feedback) <= 500 and "[...]" in feedback and "1111" in feedback


def test_an_attempt_has_a_time_of_its_own():
    tests = {**ADD, "tests": ADD["tests"] * 20}
    slow = "import time\ndef add(a, b):\n    time.sleep(0.3)\n    return a + b"
    start = time.monotonic()
    result = score(slow, tests, attempt_seconds=0.7, reward="fraction")
    assert 0 < result.reward < 0.2 and "Time Limit Exceeded" in result.feedback
    assert time.monotonic() - start < 3


# --- hostile programs ------------------------------------------------------------------------------------------------

SECRET = "the expected value is 3"


def run(program, level, call=None, **limits):
    return sandbox.run(program, level=level, call=call, limits=Limits(**{"seconds": 1.5, **limits}))


def tried(*actions, setup="import os, socket, ctypes, signal"):
    """A program that prints what each action gives, or the kind of its error."""
    lines = [
        f"try:\n    print({action})\nexcept BaseException as e:\n    print(type(e).__name__)" for action in actions
    ]
    return "\n".join([setup, *lines])


@pytest.mark.parametrize("level", LEVELS)
def test_no_process_no_network_no_signal_no_file(level, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("alive")
    os.chmod(tmp_path, 0o777)
    os.chmod(victim, 0o666)
    actions = [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "__import__('subprocess').run(['true'])",
        "socket.socket()",
        "socket.socketpair()",
        "socket.create_connection(('127.0.0.1', 1))",
        f"os.kill({os.getpid()}, 9)",
        f"os.remove({str(victim)!r})",
        f"open({str(victim)!r}, 'w')",
        f"os.truncate({str(victim)!r}, 0)",
        f"os.chmod({str(victim)!r}, 0)",
        f"os.rename({str(victim)!r}, 'x')",
        "open('big', 'wb')",
        "os.mkdir('folder')",
        "os.symlink('a', 'b')",
        "os.memfd_create('m')",
        "os.setuid(0)",
    ]
    output = run(tried(*actions), level).output.decode().split()
    assert len(output) == len(actions)
    assert set(output) <= {"PermissionError", "FileNotFoundError", "OSError"}, output
    assert victim.read_text() == "alive"


RAW = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(64)
for call in ({calls}):
    print(libc.syscall(*call))
"""


@pytest.mark.parametrize("level", LEVELS)
def test_system_calls_that_python_does_not_offer_are_refused_too(level):
    # clone, vfork, ptrace, io_uring_setup, userfaultfd, unshare, process_vm_readv, bpf, setns, memfd_create, F_SETOWN,
    # an openat to write, an ioctl that types into a terminal, limits of another process
    pid = os.getpid()
    calls = "(56, 17, 0, 0, 0, 0), (58,), (101, 16, 1, 0, 0), (425, 1, buffer), (323, 0), (272, 0x10000000)"
    calls += f", (310, {pid}, buffer, 1, buffer, 1, 0), (321, 0, buffer, 64), (308, 0, 0), (319, buffer, 0)"
    calls += f", (72, 0, 8, {pid}), (257, -100, b'new', 0x41, 0o600), (16, 0, 0x5412, buffer)"
    calls += f", (302, {pid}, 7, None, buffer)"
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    result = run(RAW.format(calls=calls), level)
    assert result.output.split() == [b"-1"] * 14, (result.output, result.errors)


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "restricted"])
def test_files_outside_cannot_be_read(level, tmp_path):
    home = Path.home() / f".sdpo-test-{os.getpid()}"
    places = [tmp_path / "secret", home]
    try:
        for place in places:
            place.write_text(SECRET)
            os.chmod(place, 0o644)
        paths = [*map(str, places), "/etc/passwd", f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/mem"]
        paths += [f"/proc/{os.getpid()}/{name}" for name in ("cmdline", "fd/0", "fd/1", "cwd/README.md")] + [__file__]
        actions = [f"open({path!r}).read()[:99]" for path in paths]
        actions += [f"os.listdir({str(tmp_path)!r})", "os.open('/proc/self/root' + os.devnull, os.O_RDWR)"]
        output = run(tried(*actions), level).output.decode().splitlines()
    finally:
        home.unlink(missing_ok=True)
    assert len(output) == len(actions)
    assert set(output) <= {"PermissionError", "FileNotFoundError", "OSError"}, output


@pytest.mark.parametrize("level", LEVELS)
def test_bombs_are_held(level):
    fork_bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: break\nprint('no')"
    assert run(fork_bomb, level).output == b"no\n"
    threads = "import threading, time\nthreading.stack_size(1 << 20)\nwhile True:\n"
    threads += "    threading.Thread(target=time.sleep, args=(9,)).start()"
    assert "RuntimeError: can't start new thread" in run(threads, level, memory=256 << 20).errors
    assert run("while True: print('x' * 9999)", level, output=1 << 16).ended == "output"
    endless = run("import sys\nwhile True: sys.stderr.write('x' * 9999)", level, output=1 << 16)
    assert endless.ended == "output" and len(endless.errors) <= 1 << 16
    assert "MemoryError" in run("x = bytearray(2 << 30)", level).errors
    many = run("x = []\nwhile True: x.append(bytearray(1 << 22))", level, memory=256 << 20, seconds=5)
    assert "MemoryError" in many.errors or many.ended == "signal"


def children():
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_when_time_is_up(level):
    program = "import os, signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    program += "    except (OSError, ValueError): pass\nos.close(0); os.close(1); os.close(2)\ntime.sleep(77)"
    start, before = time.monotonic(), children()
    result = run(program, level, seconds=0.4)
    assert result.ended == "time" and time.monotonic() - start < 5
    assert children() == before


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid())
        sys.stdout.flush()
        time.sleep(77)
    os._exit(0)
os.wait()
"""


def test_a_daemon_does_not_outlive_the_weakest_level():
    result = run(DAEMON, "limited", seconds=3)
    pid = result.output.decode().strip()
    time.sleep(0.1)
    state = Path(f"/proc/{pid}/stat")
    assert pid and (not state.exists() or state.read_text().split()[2] == "Z")


@pytest.mark.parametrize("level", LEVELS)
def test_the_network_of_the_host_is_out_of_reach(level):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}))", level)
        assert result.exit_code == 1 and "PermissionError" in result.errors


FORGERIES = {
    "equal to all": """
class A(int):
    __eq__ = lambda *a: True
    __ne__ = lambda *a: False
def add(a, b): return A(7)
""",
    "a value that never ends": """
class A:
    tolist = lambda self: A()
def add(a, b): return A()
""",
    "exit 0": "import os\nos._exit(0)",
    "exit in import": "import sys\nsys.exit(0)",
    "exit in the function": "import os\ndef add(a, b): os._exit(0)",
    "a verdict on stdout": """
print('PASS', '{"passed": true, "reward": 1.0}')
def add(a, b): return 'PASS'
""",
    "a verdict on every descriptor": """
import os
for fd in range(64):
    for text in (b'true', bytes([6]), b'{"reward": 1, "passed": true}'):
        try: os.write(fd, text)
        except OSError: pass
os._exit(0)
""",
    "moved descriptors": """
import os
for fd in range(3, 64):
    try: os.dup2(1, fd)
    except OSError: pass
def add(a, b): return 3
""",
    "closed descriptors": "import os\nos.closerange(0, 64)\ndef add(a, b): return 3",
    "two answers": "import os\ndef add(a, b):\n    for fd in range(3, 9):\n        os.write(fd, b'3 ')\n    return 3",
    "json": """
import json
json.dumps = lambda *a, **k: 'true'
json.loads = lambda *a: 3
def add(a, b): return 1
""",
    "stdout": "import sys\nsys.stdout = sys.__stdout__ = None\ndef add(a, b): return None",
    "builtins": """
import builtins
builtins.isinstance = lambda *a: True
builtins.type = lambda *a: int
def add(a, b): return 'x'
""",
    "frames": """
import sys, gc
def add(a, b):
    frame, found = sys._getframe(), list(gc.get_objects())
    while frame:
        found += frame.f_locals.values()
        frame = frame.f_back
    for value in found:
        if isinstance(value, dict):
            for key in ('output', 'expected', 'tests'):
                if type(value.get(key)) is int: return value[key]
    return None
""",
    "argv, environment, proc, descriptors": """
import os, sys, re
def add(a, b):
    text = repr(sys.argv) + repr(sys.orig_argv) + repr(os.environ)
    for name in ('environ', 'cmdline', 'mem', 'maps', 'fd/0'):
        for pid in (os.getppid(), os.getpid()):
            try: text += open(f'/proc/{pid}/{name}', errors='replace').read(1 << 16)
            except OSError: pass
    for fd in range(64):
        try: text += repr(os.read(fd, 1 << 16))
        except OSError: pass
    found = re.search('987654[0-9]+', text)
    return int(found[0]) if found else 0
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_cannot_be_forged(name):
    # A number that no program can guess, so that the only way to it is to find it.
    tests = {"type": "functional", "fn_name": "add", "tests": [{"input": [1, 2], "output": 987654321012345}]}
    result = score(FORGERIES[name], tests)
    assert result.reward == 0.0 and result.feedback


@pytest.mark.parametrize("program", ["import os\nos._exit(0)", "print('PASS')", "import sys\nsys.exit(0)", "pass"])
def test_a_verdict_on_standard_output_cannot_be_forged(program):
    assert score(program, ECHO).reward == 0.0


def test_a_box_that_cannot_be_set_up_is_an_error_and_no_reward(monkeypatch):
    monkeypatch.setattr(sandbox, "_command", lambda *_: ["false"])
    with pytest.raises(RuntimeError, match="could not be set up"):
        score(GOOD_ADD)


def test_without_any_box_nothing_runs_unless_it_is_trusted(monkeypatch):
    monkeypatch.setattr(sandbox.seccomp, "program", lambda: None)
    sandbox.isolation_level.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="programs that you trust"):
            score(GOOD_ADD)
        assert score(GOOD_ADD, level="limited").reward == 1.0
    finally:
        sandbox.isolation_level.cache_clear()


@pytest.mark.skipif("contained" not in LEVELS, reason="needs Landlock")
@pytest.mark.parametrize("missing", ["seccomp", "landlock"])
def test_a_level_that_does_not_hold_is_not_taken(monkeypatch, missing):
    assert sandbox._works("contained")
    whole = sandbox._confinement
    monkeypatch.setattr(sandbox, "_confinement", lambda *a: {**whole(*a), missing: None})
    assert not sandbox._works("contained")


def test_the_size_of_a_file_is_limited_where_files_can_be_written():
    program = "f = open('big', 'wb')\nf.truncate(10 << 30)"
    assert "File too large" in run(program, "limited", file=1 << 20).errors
    program = "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))"
    assert "File too large" in run(program, "limited", file=1 << 20).errors
    assert not list(Path("/tmp").glob("sdpo-sandbox-*/big"))


def test_what_a_program_can_import_besides_the_standard_library_is_named(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 3")
    os.chmod(tmp_path, 0o755)
    program = "import helper\ndef add(a, b): return a + b"
    assert score(program).reward == 0.0
    assert score(program, paths=[str(tmp_path)]).reward == 1.0
