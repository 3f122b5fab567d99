"""A seccomp filter for one Python program: the system calls it may make; every other one fails with EPERM.

A list of what is allowed, not of what is forbidden: a call that a later kernel adds is refused. Allowed are memory,
threads, reading, writing to what is already open, clocks. Absent are, among others, fork, exec, sockets, signals to
others, ptrace, mounts, namespaces, io_uring, and everything that makes, renames, removes or changes a file.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence

# name: number on x86_64, number on aarch64 (None: it has no such call)
_CALLS: dict[str, tuple[int | None, int | None]] = {
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None)},
    **{"poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215)},
    **{"brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139)},
    **{"pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None)},
    **{"pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216)},
    **{"madvise": (28, 233), "dup": (32, 23), "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101)},
    **{"getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "exit": (60, 93)},
    **{"uname": (63, 160), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "readlink": (89, None)},
    **{"umask": (95, 166), "gettimeofday": (96, 169), "getrusage": (98, 165), "sysinfo": (99, 179)},
    **{"times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175)},
    **{"getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158)},
    **{"getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156)},
    **{"sigaltstack": (131, 132), "statfs": (137, 43), "fstatfs": (138, 44), "arch_prctl": (158, None)},
    **{"gettid": (186, 178), "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123)},
    **{"getdents64": (217, 61), "set_tid_address": (218, 96), "restart_syscall": (219, 128)},
    **{"fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114)},
    **{"clock_nanosleep": (230, 115), "exit_group": (231, 94), "newfstatat": (262, 79), "readlinkat": (267, 78)},
    **{"faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73), "set_robust_list": (273, 99)},
    **{"get_robust_list": (274, 100), "dup3": (292, 24), "pipe2": (293, 59), "preadv": (295, 69)},
    **{"pwritev": (296, 70), "getcpu": (309, 168), "getrandom": (318, 278), "membarrier": (324, 283)},
    **{"statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436), "faccessat2": (439, 439)},
}
_OPEN, _OPENAT, _CLONE, _CLONE3 = (2, None), (257, 56), (56, 220), (435, 435)
_FCNTL, _IOCTL, _PRLIMIT = (72, 25), (16, 29), (302, 261)

_MAKES_OR_CHANGES = 0x1 | 0x2 | 0x40 | 0x200 | 0x400000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE
_THREAD = 0x10000  # CLONE_THREAD
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, descriptor and status flags: no F_SETOWN, which signals others
_IOCTL_COMMANDS = (0x5401, 0x5450, 0x5451)  # TCGETS, FIONCLEX, FIOCLEX
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | 1, 0x50000 | 38
_NUMBER, _ARCH = 0, 4


def program() -> bytes | None:
    """The filter as an array of `struct sock_filter`; None on an architecture whose numbers are not known here."""
    column, arch = _ARCHITECTURES.get(platform.machine(), (None, 0))
    if column is None:
        return None
    code = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]

    def add(call: Sequence[int | None], block: Sequence[tuple[int, int, int, int]]) -> None:
        number = call[column]
        if number is not None:
            code.extend([(_EQUAL, 0, len(block), number), *block])

    for numbers in _CALLS.values():
        add(numbers, [(_RETURN, 0, 0, _ALLOW)])
    add(_OPEN, _unless_bits(1, _MAKES_OR_CHANGES))
    add(_OPENAT, _unless_bits(2, _MAKES_OR_CHANGES))
    # A thread is made with the same call as a process. clone3 has its flags in memory, where a filter cannot look:
    # told that it does not exist, the C library falls back to clone.
    add(_CLONE, [*_argument(0), (_BITS, 0, 1, _THREAD), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)])
    add(_CLONE3, [(_RETURN, 0, 0, _ENOSYS)])
    add(_FCNTL, _only(1, _FCNTL_COMMANDS))
    add(_IOCTL, _only(1, _IOCTL_COMMANDS))
    add(_PRLIMIT, _only(0, (0,)))
    code.append((_RETURN, 0, 0, _EPERM))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _argument(index: int) -> list[tuple[int, int, int, int]]:
    """Loads the low half of an argument, which holds all flags and commands used here."""
    return [(_LOAD, 0, 0, 16 + 8 * index)]


def _unless_bits(index: int, bits: int) -> list[tuple[int, int, int, int]]:
    return [*_argument(index), (_BITS, 0, 1, bits), (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]


def _only(index: int, values: Sequence[int]) -> list[tuple[int, int, int, int]]:
    checks = [step for value in values for step in ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))]
    return [*_argument(index), *checks, (_RETURN, 0, 0, _EPERM)]
