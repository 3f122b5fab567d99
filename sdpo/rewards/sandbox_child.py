"""What runs inside the box, before and around the program. Standard library only; started with `python -c`.

Standard input holds one line with the length of a JSON object, that object, and then the program's own input. It
holds no expected output, and no verdict is made here: all that a program can find or forge is its own answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import types
from typing import Any

FILE = "solution.py"
READY = b"\x06"
_KEEPCAPS, _NO_NEW_PRIVS, _SECCOMP, _DEATH_SIGNAL, _KILL = 8, 38, 22, 1, 9
_READ_SEARCH = 1 << 2  # CAP_DAC_READ_SEARCH
# Landlock, by version of its interface: which rights exist, and how large the structure with them is.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def main() -> None:
    size = 0
    while (digit := os.read(0, 1)) != b"\n":
        size = size * 10 + int(digit)
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data))
    spec = json.loads(data)
    channel = os.dup(1)
    if spec["call"] is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _confine(spec)
    os.write(channel, READY)  # before the program runs, so it stands first whatever the program writes
    sys.path[:] = [*sys.path, *spec["paths"]]
    sys.argv[:] = [FILE]
    code = spec["program"]
    module = types.ModuleType("__main__" if spec["call"] is None else "solution")
    sys.modules[module.__name__] = module
    try:
        exec(compile(spec["prelude"], "<prelude>", "exec"), module.__dict__)
        exec(compile(code, FILE, "exec"), module.__dict__)
        if spec["call"] is not None:
            _answer(module, spec["call"], channel)
    except SystemExit:
        if spec["call"] is None:
            raise
        _fail(code)
    except BaseException:
        _fail(code)


def _answer(module: types.ModuleType, call: dict[str, Any], channel: int) -> None:
    """Writes what the function returns, as JSON."""
    name = call["fn_name"].split(".")[-1]
    owner = module.Solution() if hasattr(module, "Solution") else module
    text = json.dumps(getattr(owner, name)(*call["args"]), default=_plain)
    data = text.encode()
    while data:
        data = data[os.write(channel, data) :]
    os._exit(0)


def _plain(value: Any) -> Any:
    """Arrays and numbers of other libraries as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the function returned a {type(value).__name__}, which JSON has no word for")


def _fail(code: str) -> None:
    """Traceback without the frames of this file, then the end."""
    # Imported here since most runs do not need them, and they take a third of the time to start.
    import linecache
    import traceback

    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    kind, error, trace = sys.exc_info()
    while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
        trace = trace.tb_next
    try:
        sys.stdout.flush()
        traceback.print_exception(kind, error, trace, limit=-8)
        sys.stderr.flush()
    finally:
        os._exit(1)


# --- confinement -----------------------------------------------------------------------------------------------------


def _confine(spec: dict[str, Any]) -> None:
    """Everything that this process gives up for good."""
    import resource  # Windows has none, and must be able to import this file

    libc = ctypes.CDLL(None, use_errno=True)
    for name, value in spec["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if spec["landlock"] is not None:
        _restrict_files(libc, spec["landlock"])
    if spec["uid"] is not None:
        _drop_root(libc, spec["uid"], keeps_reading=spec["landlock"] is not None)
    if sys.platform != "linux":
        return
    if spec["seccomp"] is not None:
        _check(libc.prctl(_DEATH_SIGNAL, _KILL, 0, 0, 0), "prctl")
        _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        _filter_calls(libc, bytes.fromhex(spec["seccomp"]))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _restrict_files(libc: Any, readable: list[str]) -> None:
    """Landlock: reading under `readable` and nothing else; no connection by TCP, no signal to other processes."""
    version = _check(libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), "Landlock")
    rights = (1 << _RIGHTS.get(version, 16)) - 1
    attributes = [rights, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    array = (ctypes.c_uint64 * len(attributes))(*attributes)
    size = ctypes.c_size_t(ctypes.sizeof(array))
    ruleset = _check(libc.syscall(_CREATE_RULESET, ctypes.byref(array), size, 0), "Landlock")
    for path in readable:
        try:
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        rule = allowed.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder)
        _check(libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"Landlock, {path}")
        os.close(folder)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _drop_root(libc: Any, uid: int, *, keeps_reading: bool) -> None:
    """Another user, without capabilities.

    `keeps_reading`: the interpreter may lie in the home of root, and Landlock already says what may be read; the right
    to pass by closed folders is kept.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    _check(libc.prctl(_KEEPCAPS, 1 if keeps_reading else 0, 0, 0, 0), "prctl")
    os.setresuid(uid, uid, uid)
    kept = _READ_SEARCH if keeps_reading else 0
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)), "capset")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _filter_calls(libc: Any, code: bytes) -> None:
    filters = _Program(len(code) // 8, code)
    _check(libc.prctl(_SECCOMP, 2, ctypes.byref(filters), 0, 0), "seccomp")


if __name__ == "__main__":
    main()
