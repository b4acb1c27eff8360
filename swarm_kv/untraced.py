"""`@untraced`: a function that compilers leave alone, and all that it calls.

`torch.compiler.disable` imports the whole compiler, which takes seconds, where it decorates; this
one, which torch has for its own use, does so at the first call.
"""

from __future__ import annotations

from torch._compile import _disable_dynamo as untraced

__all__ = ["untraced"]
