"""Run Triton kernels on the CPU, also where triton was imported without TRITON_INTERPRET.

The variable is read when a function is decorated, triton's own library included, so setting it before our
import works only if nothing in the process imported triton earlier. Other tests do. Replacing the compiled
functions by interpreted ones works in either order and leaves the environment of subprocesses alone.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon  # noqa: F401  (copies the compiled library functions when first imported)
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


def interpret(*modules: ModuleType) -> None:
    """Replace every @triton.jit function in the modules' namespaces by its interpreted twin."""
    _repair_conversions()
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(value.fn))


def _repair_conversions() -> None:
    """triton 3.9's interpreter holds bf16 as uint16, multiplies those bit patterns as integers in a dot, and
    loses the carry when it rounds float32 to bf16 or fp8. Convert with torch instead.
    """
    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "conversions_repaired", False):
        return
    dot, cast = builder.create_dot, builder.cast_impl

    def widen(handle: Any) -> Any:
        wide = cast_impl(None, handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle
        # BLAS rounds a transposed view and a copy of it differently; tensor cores see values only.
        return interpreter.TensorHandle(np.ascontiguousarray(wide.data), wide.dtype)

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(self, widen(a), widen(b), *args)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            data = (src.data.astype(np.uint32) << 16).view(np.float32)
            return interpreter.TensorHandle(data, tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        kinds = (src.dtype.scalar, dst_type.scalar)
        if set(kinds) == {tl.float32, tl.bfloat16}:
            return cast_impl(self, src, dst_type)
        if kinds == (tl.float32, tl.float8e4nv):  # the interpreter rounds halves up and carries nothing
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.float8_e4m3fn)
            return interpreter.TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)
        if kinds == (tl.float8e4nv, tl.float32):  # nor does it know e4m3's NaN
            exact = torch.from_numpy(np.ascontiguousarray(src.data)).view(torch.float8_e4m3fn).float()
            return interpreter.TensorHandle(exact.numpy(), tl.float32)
        return convert(self, src, dst_type, rounding_mode)

    convert = builder.create_fp_to_fp
    builder.create_dot, builder.cast_impl, builder.create_fp_to_fp = create_dot, cast_impl, create_fp_to_fp
    for name in ("create_fp_ext", "create_fp_trunc"):  # bound to the old cast_impl when the class was made
        setattr(builder, name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
    builder.conversions_repaired = True
