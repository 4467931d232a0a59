"""Follows device pointers in host code, in children that die of it; prints how, as JSON."""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
from collections.abc import Callable

import numpy
import torch

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def follow(address: int) -> None:
    ctypes.string_at(address, 4)


def through_numpy(address: int) -> None:
    array = numpy.ctypeslib.as_array((ctypes.c_float * 4).from_address(address))
    print(array.sum())


def with_faulthandler_before() -> None:
    faulthandler.enable()
    follow(torch.ones(4, device="cuda").data_ptr())


def with_a_handler_of_the_script_before() -> None:
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os._exit(42))
    ctypes.CDLL(None).signal(int(signal.SIGSEGV), handler)
    follow(torch.ones(4, device="cuda").data_ptr())


def with_faulthandler_after(address: int) -> None:
    faulthandler.enable()
    follow(address)


def with_faulthandler_before_and_after() -> None:
    faulthandler.enable()
    address = torch.ones(4, device="cuda").data_ptr()
    faulthandler.enable()
    follow(address)


def with_faulthandler_no_more(address: int) -> None:
    faulthandler.enable()
    faulthandler.disable()
    follow(address)


def in_child(fate: Callable[[], object]) -> list[object]:
    """Exit status (negative: signal), and what it wrote to stderr."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        fate()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]


if __name__ == "__main__":
    # These use the device themselves, as this process has not yet.
    result = {
        each.__name__: in_child(each)
        for each in (
            with_faulthandler_before,
            with_a_handler_of_the_script_before,
            with_faulthandler_before_and_after,
        )
    }
    address = torch.ones(4, device="cuda").data_ptr()
    for variant in (follow, through_numpy, with_faulthandler_after, with_faulthandler_no_more):
        result[variant.__name__] = in_child(lambda variant=variant: variant(address))  # type: ignore[misc]
    result["a pointer to nowhere"] = in_child(lambda: follow(8))
    result["a signal that was sent"] = in_child(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    result["a pointer to nowhere, with faulthandler"] = in_child(lambda: with_faulthandler_after(8))
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
