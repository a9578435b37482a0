"""A kernel with the arguments that the shape of a call decides, ready for those of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from flexmod.errors import BackendError
from flexmod.kernels import tuning
from flexmod.kernels.memory import Work
from flexmod.kernels.tuning import Tiles


class TooLarge(BackendError):
    """A device had no room for the tiles of a kernel: plan again, and they will be smaller."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel for every call of one shape.

    A kernel's signature is: tensors, which each call brings; `fixed`; words, which each call brings
    too (the seed of dropout); the compile-time `fields`. What a call brings does not change the
    machine code: so this is found once, and launched directly from then on.
    """

    module: ModuleType
    name: str
    programs: int  # on a one-dimensional grid, which has no limit of 65,535
    fixed: tuple[int | float, ...]  # lengths, strides, numbers
    fields: dict[str, Any]
    tiles: Tiles
    device: torch.device
    work: Work | None = None  # what the planner knows the kernel as
    options: dict[str, Any] = field(default_factory=dict)  # more for the compiler
    _direct: list[Callable[..., None]] = field(default_factory=list, repr=False)  # one, if found

    @property
    def kernel(self) -> Any:
        return getattr(self.module, self.name)

    def run(self, tensors: Sequence[Tensor], words: Sequence[int] = ()) -> None:
        """Whatever Triton raises becomes one BackendError, TooLarge where smaller tiles may do."""
        device = self.device.index
        if device is not None and torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self.run(tensors, words)
        try:
            if self._direct:
                self._direct[0](tensors, words)
            else:
                self._first(tensors, words)
        except Exception as error:
            why = f"{self.name}: the kernel could not be built or launched: {error}"
            if self.work is not None and _is_out_of_room(error):
                tuning.refuse(self.work, self.tiles)
                raise TooLarge(why) from error
            raise BackendError(why) from error

    def _first(self, tensors: Sequence[Tensor], words: Sequence[int]) -> None:
        """By Triton's own way, which compiles where needed, unless a launch alike did so before.

        Machine code depends on what `fields` and the module say, the device, the alignment of
        tensors, and which integers need 64 bits.
        """
        known: dict[Any, Any] = self.module.__dict__.setdefault("_compiled", {})
        aligned = tuple(x.data_ptr() % 16 == 0 for x in tensors)
        wide = tuple(isinstance(n, int) and not -(2**31) <= n < 2**31 for n in self.fixed)
        key = (self.name, self.device.index, aligned, wide, *self.fields.items())
        if key in known:
            self._direct.append(self._launcher(known[key]))
            return self.run(tensors, words)
        _set_allocator()(_scratch)
        compiled = self.kernel[(self.programs,)](
            *(readable(x) for x in tensors),
            *self.fixed,
            *words,
            **self.fields,
            num_warps=self.tiles.warps,
            num_stages=self.tiles.stages,
            enable_fp_fusion=True,
            **self.options,
        )
        if hasattr(compiled, "packed_metadata"):  # not in the interpreter
            known[key] = compiled

    def _launcher(self, compiled: Any) -> Callable[[Sequence[Tensor], Sequence[int]], None]:
        """What launches a compiled kernel directly: the end of Triton's runner.

        While a profiler listens to launches, Triton's runner is called, which tells it.
        """
        from triton import knobs
        from triton.runtime.driver import driver

        set_allocator = _set_allocator()
        launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        stream_of, listeners = driver.active.get_current_stream, knobs.runtime
        needs_scratch = getattr(launch, "global_scratch_size", 1) > 0
        programs, device, fixed = self.programs, self.device.index, self.fixed
        constants = [self.fields[n] for n in self.kernel.arg_names if n in self.fields]

        def run(tensors: Sequence[Tensor], words: Sequence[int]) -> None:
            if needs_scratch:
                set_allocator(_scratch)
            enter, leave = listeners.launch_enter_hook, listeners.launch_exit_hook
            pointers = [x.data_ptr() for x in tensors]
            if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
                compiled[(programs, 1, 1)](*pointers, *fixed, *words, *constants)
                return
            launch(
                programs, 1, 1, stream_of(device), function, metadata, None, None, None,
                *pointers, *fixed, *words, *constants,
            )  # fmt: skip

        return run


_scratches: dict[int, Tensor] = {}  # by device


@cache
def _set_allocator() -> Callable[[Any], None]:
    import triton

    return triton.set_allocator  # type: ignore[no-any-return]


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where descriptors that are made in a kernel are kept; Triton asks for it at each launch.

    The kernels of the default stream follow each other, so they share theirs. Graphs are recorded
    on other streams, and nothing may outlive that.
    """
    found = None if stream else _scratches.get(torch._C._cuda_getDevice())
    if found is None or found.numel() < size:
        found = torch.empty(size, dtype=torch.int8, device="cuda")
        if not stream:
            _scratches[found.device.index] = found
    return found


def _is_out_of_room(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources)


def readable(x: Tensor) -> Tensor:
    """A tensor as Triton takes it: without a gradient, booleans as bytes.

    Triton's interpreter, which CPU tensors are for, keeps bfloat16 as raw bits and computes
    nonsense with it: there it becomes float32, of the same strides.
    """
    x = x.detach()
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return whole.float().as_strided(x.shape, x.stride(), x.storage_offset())
    return x
