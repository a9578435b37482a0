"""`patch_torch`: programs that call torch's flex_attention and cannot be edited."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from flexmod.blocks import BlockMask

_MODULE = "torch.nn.attention.flex_attention"


def patch_torch() -> Patch:
    """Make torch.nn.attention.flex_attention run on this package, here and now.

    Its `flex_attention`, `create_block_mask` and `create_mask` do what flexmod's do, for
    everybody who has them: also modules that imported them by name before, and functions that
    hold them, compiled ones too. `BlockMask` becomes flexmod's in torch's module and in every
    module outside of torch that has imported it by then. It holds for all threads.

    Returns:
        A context manager; at its end, or by its method `undo`, torch's own are back.

    Example:
        >>> import flexmod
        >>> from torch.nn.attention.flex_attention import create_block_mask
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> with flexmod.patch_torch():
        ...     type(create_block_mask(causal, None, None, 256, 256, device="cpu")).__module__
        'flexmod.blocks.block_mask'
    """
    return Patch()


class Patch:
    """torch's flex_attention, replaced until `undo`. Made by `patch_torch`; patches may nest."""

    def __init__(self) -> None:
        import torch.nn.attention.flex_attention as theirs

        pairs = [(getattr(theirs, ours.__name__), ours) for ours in _REPLACEMENTS]
        self._functions = [(function, _state(function)) for function, _ in pairs]
        for function, ours in pairs:
            _become(function, _state(ours))
        self._class = theirs.BlockMask
        self._places = [] if self._class is BlockMask else _holders(self._class)
        for module, name in self._places:
            setattr(module, name, BlockMask)

    def undo(self) -> None:
        """Put torch's own back. A second call does nothing."""
        for function, state in self._functions:
            _become(function, state)
        for module, name in self._places:
            setattr(module, name, self._class)
        self._functions, self._places = [], []

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


# What torch's functions become. Their code moves into torch's function objects, so that whoever
# holds one of those calls it; there, names are looked up in torch's module: hence the imports.


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    **others: Any,
) -> Any:
    import flexmod

    return flexmod.flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux, **others,
    )  # fmt: skip


def create_block_mask(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, *others: Any, **named: Any
) -> Any:
    import flexmod

    return flexmod.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, *others, **named)


def create_mask(mod_fn: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None) -> Any:
    import flexmod

    return flexmod.create_mask(mod_fn, B, H, Q_LEN, KV_LEN, device)


_REPLACEMENTS = (flex_attention, create_block_mask, create_mask)


def _state(function: Any) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _become(function: FunctionType, state: tuple[Any, ...]) -> None:
    function.__code__, function.__defaults__, function.__kwdefaults__ = state


def _holders(value: object) -> list[tuple[ModuleType, str]]:
    """torch's module, and modules outside of torch, that have a value under some name."""
    found = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name == __name__:
            continue
        if name.split(".")[0] != "torch" or name == _MODULE:
            names = [n for n, x in list(vars(module).items()) if x is value]
            found += [(module, n) for n in names]
    return found
