"""Imports bitsandbytes without the compiler, which is a fifth of what it takes to import peft.

Two of its functions are compiled when it is imported, of int8 weights. What tests compile imports the compiler itself.
"""

import contextlib

import pytest
import torch

with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
    patch.setattr(torch, "compile", lambda function, **options: function)
    import bitsandbytes  # noqa: F401
