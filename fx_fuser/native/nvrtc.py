"""NVRTC as a program: `nvrtc.py LIBRARY SOURCE TARGET OPTION...`.

Each source has its own process, as with nvcc: ninja runs several at once, and a build may be
killed. It runs as a file, with `python -I -S`: as a module of fx_fuser it would import torch, which
takes longer than most kernels take to compile.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


class Library:
    """libnvrtc, loaded. A call that fails ends the process with NVRTC's error."""

    def __init__(self, path: Path) -> None:
        try:
            # libnvrtc opens its builtins by their bare name: they must have been loaded before.
            for builtins in path.resolve().parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            self._functions = ctypes.CDLL(str(path))
            self._functions.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            sys.exit(f"{path} does not load ({error}); reinstall NVRTC")

    def call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._functions, name)(*arguments):
            sys.exit(f"{name}: {self._functions.nvrtcGetErrorString(status).decode()}")

    def read(self, name: str, program: ctypes.c_void_p) -> bytes:
        """The bytes of nvrtcGet<name>; nvrtcGet<name>Size says how many."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{name}", program, data)
        return data.raw


def main(path: str, source: str, target: str, *options: str) -> None:
    """Writes the cubin if the source compiles; prints NVRTC's log, with what ptxas says, anyway."""
    library, program = Library(Path(path)), ctypes.c_void_p()
    text, name = Path(source).read_bytes(), os.fsencode(source)
    library.call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
    words = (ctypes.c_char_p * len(options))(*map(os.fsencode, options))
    try:
        library.call("nvrtcCompileProgram", program, len(options), words)
    finally:
        log = library.read("ProgramLog", program).rstrip(b"\0")
        print(log.decode(errors="replace"), flush=True)
    Path(target).write_bytes(library.read("CUBIN", program))


if __name__ == "__main__":
    main(*sys.argv[1:])
