"""Calls of native functions as part of a CUDA stream: in a recording they are nodes of it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_DRIVER = "libcuda.so.1"


@functools.cache
def _launch_host_func() -> Any:
    function = ctypes.CDLL(_DRIVER).cuLaunchHostFunc
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def call_on(stream: torch.cuda.Stream, function: Any, argument: int) -> None:
    """Have the driver call `function(argument)` once all work before it in the stream has ended;
    later work waits for it. function: compiled, of one address, as from `jit.compile_kernels`; it
    must not use the GPU. The argument must live as long as recordings of it."""
    address = ctypes.cast(function, ctypes.c_void_p)
    error = _launch_host_func()(stream.cuda_stream, address, argument)
    if error:
        raise RuntimeError(f"cuLaunchHostFunc failed with CUDA error {error}")
