"""What a mod cannot do, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from flexmod.errors import TraceError

# How the mods of ordinary Python reach for a value that does not exist while tracing.
PYTHON_VALUE = {
    "__bool__": "a traced value has no truth value while tracing: instead of if/and/or/not write "
    "torch.where(condition, x, y), &, |, ~; instead of min/max torch.minimum/torch.maximum; "
    "instead of a < b < c write (a < b) & (b < c)",
    "__float__": "a traced value has no Python value: use torch functions instead of math",
    "__int__": "a traced value has no Python value: use .long() or .to(dtype) for a cast",
    "__index__": "a traced value has no Python value: index a tensor with it, not a list or range",
    "__format__": "a traced value has no Python value: it cannot be formatted as a number",
    "__len__": "a traced value is a scalar and has no length",
    "__iter__": "a traced value is a scalar and cannot be iterated over",
    "item": "a traced value has no Python value: compute with it as a tensor",
    "tolist": "a traced value has no Python value: compute with it as a tensor",
    "numpy": "a traced value has no Python value: use torch functions instead of numpy",
    "backward": "gradients are taken through flex_attention, not inside a mod",
}
PYTHON_VALUE["__complex__"] = PYTHON_VALUE["__float__"]
PYTHON_VALUE["__array__"] = PYTHON_VALUE["numpy"]
RANDOM = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "normal", "dropout", "uniform", "exponential", "random", "log_normal", "cauchy",
    "geometric",
}  # fmt: skip


def unknown(name: str, known: Iterable[str]) -> TraceError:
    """For a torch function that is not recorded, with the nearest ones that are."""
    public = [n for n in known if not n.startswith("__")]
    close = difflib.get_close_matches(name, public, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    if name in RANDOM:
        hint = ": draw random numbers outside of the mod, into a tensor, and index it"
    return TraceError(f"torch's {name} is not supported in a mod{hint}")
