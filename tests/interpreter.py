"""Triton's interpreter, made quicker for the tests of kernels."""

from __future__ import annotations

from typing import Any


def faster_interpreter() -> None:
    """Let a launch patch Triton's language once, and not again in every call of a device function.

    The interpreter looks for what there is to patch among all names of the language, each time: that was a third of its
    time. Within a launch nothing is left to patch after the first call from functions that see the same modules. The
    end of a launch takes back all that it patched, so that kernels can be compiled in the same process.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[tuple[bool, bool]] = set()  # which modules of the language the functions of this launch see
    patched: list[Any] = []  # what each of them changed

    class Patches:
        def restore(self) -> None:
            while patched:
                patched.pop().restore()

    def patch_once(fn: Any) -> Any:
        modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        sees = (tl in modules, tl.core in modules)
        if sees in seen:
            return None  # only a launch asks for what restores, and its own call is the first
        seen.add(sees)
        patched.append(patch(fn))
        return Patches()

    def launch_once(self: Any, *arguments: Any, **named: Any) -> Any:
        seen.clear()
        return launch(self, *arguments, **named)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_once
