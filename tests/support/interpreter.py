"""Triton's interpreter, made quicker for the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def faster_interpreter() -> None:
    """Leave out what Triton's interpreter does again and again without a use.

    It looks for what there is to patch among all names of its language, in each launch and in each call of a device
    function. Here it looks once; a launch sets the same names, and takes all of them back at its end, so that kernels
    can be compiled in the same process. It compares each sum and product of integers with the limits of their type,
    for an assertion that only debugging makes. It works out for each tensor what its type says, and for each pair of
    tensors to which shape they are broadcast.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # a kernel that sees all that can be patched
    look_and_patch, scopes = interpreter._patch_lang, list[Any]()  # the names that the launch that runs has set
    names: dict[tuple[Any, str], Any] = {}  # what a launch sets in the language

    def patch(fn: Any) -> Any:
        if scopes:
            return None  # only a launch asks for what restores
        if names:
            scopes.append(interpreter._LangPatchScope())
            for (owner, name), value in names.items():
                scopes[0].set_attr(owner, name, value)
        else:
            scopes.append(look_and_patch(language))
            names.update({(owner, name): getattr(owner, name) for owner, name, _ in scopes[0]._changes})
            names[tl.core.block_type, "__init__"] = _block_types(tl.core.block_type.__init__)
            names[tl.core.tensor, "__init__"] = _tensors(tl.core.tensor.__init__)
        return SimpleNamespace(restore=lambda: scopes.pop().restore())

    interpreter._patch_lang = patch
    dtypes, dtype_of = dict[str, Any](), interpreter._get_np_dtype
    interpreter._get_np_dtype = lambda kind: dtypes.get(kind.name) or dtypes.setdefault(kind.name, dtype_of(kind))
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    semantic.broadcast_impl_value = _broadcast(semantic.broadcast_impl_value)
    builder.options = replace(builder.options, sanitize_overflow=False)


def _broadcast(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but of two tensors of one shape there is nothing to work out."""

    def to_one_shape(lhs: Any, rhs: Any) -> Any:
        is_one = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values
        return (lhs, rhs) if is_one else broadcast(lhs, rhs)

    return to_one_shape


def _block_types(init: Callable[..., None]) -> Callable[..., None]:
    """The same `__init__` of types of blocks, of which equal ones are worked out once."""
    known: dict[Any, dict[str, Any]] = {}

    def remembered(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple([size if type(size) is int else size.value for size in shape])
        if key not in known:
            init(self, element, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    return remembered


def _tensors(init: Callable[..., None]) -> Callable[..., None]:
    """The same `__init__` of tensors, of which those of one type have all but their handle in common."""
    known: dict[str, dict[str, Any]] = {}

    def remembered(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in known:
            init(self, handle, kind)
            known[kind.name] = self.__dict__
        self.__dict__ = known[kind.name] | {"handle": handle}

    return remembered
