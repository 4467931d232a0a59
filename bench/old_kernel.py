"""Runs a command as on a Linux before 5.16, which has no futex_waitv: a filter refuses the call with ENOSYS.

.venv/bin/python bench/old_kernel.py COMMAND [ARGUMENTS ...]
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

FUTEX_WAITV = 449
"""The same number on every architecture."""
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_FAIL_WITH, _ALLOW = 0x00050000, 0x7FFF0000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("operand", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def forbid_futex_waitv() -> None:
    """To this thread and whatever it starts, for good; raises OSError."""
    instructions = (_Instruction * 4)(
        _Instruction(_LOAD_WORD, 0, 0, 0),  # the number of the system call
        _Instruction(_JUMP_IF_EQUAL, 0, 1, FUTEX_WAITV),
        _Instruction(_RETURN, 0, 0, _FAIL_WITH | errno.ENOSYS),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(instructions), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"no filter of system calls: {os.strerror(number)}")


if __name__ == "__main__":
    forbid_futex_waitv()
    os.execvp(sys.argv[1], sys.argv[1:])
