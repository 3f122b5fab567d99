"""One untrusted Python program, run in a process of its own and in the strongest box that this machine has.

A program gets its input and nothing else. What it prints or returns comes back as data, to be judged here, where the
program is not: a verdict made inside could be forged from inside.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import math
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sdpo.rewards import sandbox_child, seccomp

logger = logging.getLogger(__name__)

Level = Literal["isolated", "contained", "restricted", "limited"]
"""From the strongest to the weakest; docs/code_reward.md says what each protects from."""
Ended = Literal["exit", "signal", "time", "output"]
LEVELS: tuple[Level, ...] = get_args(Level)

_CHILD = Path(sandbox_child.__file__).read_text()
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_NUM_FILES, _NUM_THREADS = 64, 64
_STDERR_BYTES = 1 << 16
_CHUNK = 1 << 16
_FIRST_UID, _NUM_UIDS = 62_000, 2_000  # of one process each, so that the limit on threads counts its own alone
_uids = itertools.count()
_MARK = "SDPO_SANDBOX"
_START_SECONDS, _NUM_STARTS = 60.0, 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use: `seconds` on the clock from where the program begins; bytes of address space, of standard
    output, and of one file (where files can be written at all)."""

    seconds: float = 5.0
    memory: int = 1 << 30
    output: int = 1 << 20
    file: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the program, and its positional arguments as JSON values."""

    fn_name: str
    args: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Run:
    """How a program ended, and what it said.

    `ended`: "exit" by itself with `exit_code`; "signal", killed by the system; "time" or "output", killed at a limit.
    `output`: what it printed, or with a `Call` the returned value as JSON. `errors`: end of its standard error. None
    of these says that the program is right, and all are the program's own words.
    """

    ended: Ended
    exit_code: int
    output: bytes
    errors: str
    seconds: float
    level: Level


def run(
    program: str,
    *,
    stdin: str = "",
    call: Call | None = None,
    limits: Limits | None = None,
    level: Level | None = None,
    prelude: str = "",
    paths: Sequence[str] = (),
) -> Run:
    """Runs `program` with `stdin`, or calls a function of it.

    `prelude` is executed before it, in the same namespace. `paths`: folders with more packages than the standard
    library, readable inside. `level` None: the strongest one available.

    Raises:
        RuntimeError: no level but "limited" is available, and it was not asked for; or the box could not be set up.
    """
    level = level or isolation_level()
    if level == "restricted":
        _hide_memory()
    limits = limits or Limits()
    spec = {
        "program": program,
        "prelude": prelude,
        "call": None if call is None else {"fn_name": call.fn_name, "args": list(call.args)},
        "paths": list(paths),
        **_confinement(level, limits, paths),
    }
    # Surrogates, which a model can write by an escape, have no UTF-8; JSON's own escapes carry them.
    message = json.dumps(spec).encode()
    data = b"%d\n%b%b" % (len(message), message, stdin.encode(errors="replace"))
    with tempfile.TemporaryDirectory(prefix="sdpo-sandbox-", ignore_cleanup_errors=True) as scratch:
        os.chmod(scratch, 0o755)  # it belongs to another user than the program where that one is not root
        for _ in range(_NUM_STARTS):
            result = _run_process(level, data, scratch, limits, paths)
            if result.output.startswith(sandbox_child.READY):
                return replace(result, output=result.output[len(sandbox_child.READY) :])
    raise RuntimeError(f"the box of level {level!r} could not be set up: {result.errors.strip() or result}")


@functools.cache
def isolation_level() -> Level:
    """The strongest level of "isolated", "contained" and "restricted" that works here, found by trying. Logged once.

    Raises:
        RuntimeError: none does.
    """
    for level in LEVELS[:-1]:
        if _works(level):
            logger.info("Programs run at isolation level %r.", level)
            if level == "restricted":
                logger.warning("Programs can read the files that this user can read; see docs/code_reward.md.")
            return level
    raise RuntimeError(
        "no way to confine programs works on this machine: bubblewrap, Landlock and seccomp need Linux on x86_64 or "
        "aarch64. For programs that you trust, pass level='limited': time and memory are limited, nothing else is"
    )


_PROBE = """
import os
def tried(action):
    try:
        action()
    except OSError:
        return False
    return True
def probe(path):
    import socket
    return [tried(lambda: os._exit(0) if os.fork() == 0 else os.wait()), tried(socket.socket),
            tried(lambda: open("made", "w")), tried(lambda: open(path))]
"""


def _works(level: Level) -> bool:
    """Whether a program runs at a level, and is refused what the level says."""
    if seccomp.program() is None or sys.platform != "linux":
        return False
    if level == "isolated" and shutil.which("bwrap") is None:
        return False
    with tempfile.NamedTemporaryFile(prefix="sdpo-probe-") as secret:
        os.chmod(secret.name, 0o644)
        try:
            result = run(_PROBE, call=Call("probe", [secret.name]), level=level, limits=Limits(seconds=20))
        except RuntimeError as error:
            logger.debug("%s", error)
            return False
    can_read = level == "restricted"
    return result.output in {json.dumps([False, False, False, can]).encode() for can in (False, can_read)}


@functools.cache
def _hide_memory() -> None:
    """Keeps processes of the same user out of this one's memory, where the expected outputs are."""
    import ctypes

    if os.geteuid() != 0:  # as root, programs run as another user
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


# --- the box ---------------------------------------------------------------------------------------------------------


def _interpreter() -> str:
    """The Python under a virtual environment, which needs no more than its standard library."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _confinement(level: Level, limits: Limits, paths: Sequence[str]) -> dict[str, Any]:
    """What the child gives up, in the words of `sandbox_child`."""
    drops_root = level in ("contained", "restricted") and os.geteuid() == 0
    resources = {
        "RLIMIT_CPU": math.ceil(limits.seconds) + 1,
        "RLIMIT_AS": limits.memory,
        "RLIMIT_FSIZE": limits.file,
        "RLIMIT_NOFILE": _NUM_FILES,
        "RLIMIT_CORE": 0,
    }
    if drops_root:
        # Elsewhere it would count everything that the user runs.
        resources["RLIMIT_NPROC"] = _NUM_THREADS
    filters = seccomp.program() if level != "limited" else None
    return {
        "limits": resources,
        "landlock": [sys.base_prefix, *_LIBRARIES, *paths] if level == "contained" else None,
        "uid": _FIRST_UID + (os.getpid() + next(_uids)) % _NUM_UIDS if drops_root else None,
        "seccomp": None if filters is None else filters.hex(),
    }


def _command(level: Level, paths: Sequence[str]) -> list[str]:
    python = [_interpreter(), "-S", "-s", "-P", "-B", "-X", "utf8", "-c", _CHILD]
    if level != "isolated":
        return python
    box = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    box += ["--uid", "65534", "--gid", "65534", "--ro-bind", "/usr", "/usr"]
    for path in ("/lib", "/lib64"):
        if os.path.islink(path):
            box += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            box += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", sys.base_prefix, os.path.dirname(_interpreter()), *paths):
        if not Path(path).is_relative_to("/usr") and os.path.exists(path):
            box += ["--ro-bind", path, path]
    box += ["--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    return [*box, *python]


# --- the process -----------------------------------------------------------------------------------------------------


def _run_process(level: Level, data: bytes, scratch: str, limits: Limits, paths: Sequence[str]) -> Run:
    """Starts it, talks to it until it ends or a limit does, and leaves nothing of it."""
    mark = uuid.uuid4().hex
    # A fixed hash seed: the order of a set, and with it a wrong program's luck, is the same in every run.
    environment = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", _MARK: mark}
    if level == "isolated":
        environment["PATH"] = os.environ.get("PATH", os.defpath)  # where bwrap is looked for
    process = subprocess.Popen(
        _command(level, paths),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=scratch,
        env=environment,
        bufsize=0,
        start_new_session=True,
    )
    try:
        stopped, output, errors, seconds = _communicate(process, data, limits)
    finally:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if level == "limited":
            _kill_marked(mark)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    code = process.returncode
    if level == "isolated" and code > 128:  # bubblewrap says so of the signal that ended its child
        code = 128 - code
    return Run(
        ended=stopped or ("signal" if code < 0 else "exit"),
        exit_code=code,
        output=output,
        errors=errors.decode(errors="replace"),
        seconds=seconds,
        level=level,
    )


def _communicate(
    process: subprocess.Popen[bytes], data: bytes, limits: Limits
) -> tuple[Ended | None, bytes, bytes, float]:
    """What stopped it, its output up to the limit, the end of its errors, and for how long the program ran."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output, errors = bytearray(), bytearray()
    read = {process.stdout: output, process.stderr: errors}
    num_errors, has_ended = 0, False
    stopped: Ended | None = None
    start, seconds = time.monotonic(), _START_SECONDS
    left = memoryview(data)
    with selectors.DefaultSelector() as selector:
        for end in (process.stdin, *read):
            os.set_blocking(end.fileno(), False)
            selector.register(end, selectors.EVENT_WRITE if end is process.stdin else selectors.EVENT_READ)
        # Until it has ended and nothing is left in the pipes; another process may hold them open, or it close them.
        while not (has_ended and not any(end in selector.get_map() for end in read)):
            if time.monotonic() > start + seconds:
                stopped = "time"
                break
            ready = selector.select(0 if has_ended else 0.005 if not selector.get_map() else 0.05)
            for key, _ in ready:
                pipe: Any = key.fileobj
                if pipe is process.stdin:
                    left = left[_write(pipe, left) :]
                    is_over = not left
                else:
                    chunk = os.read(pipe.fileno(), _CHUNK)
                    if not output and pipe is process.stdout and chunk:
                        start, seconds = time.monotonic(), limits.seconds
                    read[pipe] += chunk
                    num_errors += len(chunk) if pipe is process.stderr else 0
                    is_over = not chunk
                if is_over:
                    selector.unregister(pipe)
                    if pipe is process.stdin:
                        pipe.close()
            del errors[:-_STDERR_BYTES]
            if len(output) > limits.output + 1 or num_errors > limits.output + _STDERR_BYTES:
                stopped = "output"
                break
            if has_ended and not any(key.fileobj in read for key, _ in ready):
                break
            has_ended = has_ended or _has_ended(process)
    return stopped, bytes(output[: limits.output + 1]), bytes(errors), time.monotonic() - start


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has, without waiting for it: until that is done, nothing else can get its number and be killed."""
    if sys.platform != "linux":
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _write(pipe: Any, data: memoryview) -> int:
    """Number of bytes that need not be written any more; all of them where nobody reads."""
    try:
        return os.write(pipe.fileno(), data[:_CHUNK])
    except BrokenPipeError:
        return len(data)


def _kill_marked(mark: str) -> None:
    """Ends what left the group, as far as it kept the environment it was started with."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, ValueError):
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
