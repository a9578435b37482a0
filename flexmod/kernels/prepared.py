"""How the calls of one shape run: an engine, and what it has worked out for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress

from torch import Tensor

from flexmod.bounded import Bounded
from flexmod.counters import COUNTS
from flexmod.errors import BackendError
from flexmod.kernels import choose
from flexmod.kernels.launch import TooLarge
from flexmod.kernels.problem import Gradients, Inputs, Operands, Problem, Result, Saved


class Prepared:
    """One checked call, ready to run.

    An engine may have `prepare` and `prepare_backward` beside `forward` and `backward`: they
    return what runs this call and every other that differs in its operands alone, and hold none
    of its tensors. Then the prepared call `is_lasting`: it may be kept, and run others like it.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, choice: choose.Choice, trains: bool
    ) -> None:
        self.choice, self.trains = choice, trains
        self._engine = choose.backend(choice.name)
        self._forward: Callable[[Operands], Result] | None = None
        self._backwards: Bounded[Hashable, Callable[[Operands, Saved], Gradients]] = Bounded(64)
        if hasattr(self._engine, "prepare") and not problem.is_empty:
            with suppress(BackendError):  # raised again, and answered, when it runs
                self._forward = self._engine.prepare(problem, inputs)
        self.is_lasting = self._forward is not None
        self._problem = problem.shell() if self.is_lasting else problem
        self.device, self.has_sink = problem.device, problem.sink is not None

    def problem(self, given: Operands) -> Problem:
        return self._problem.filled(given)

    def forward(self, given: Operands) -> Result:
        """Run it; if a kernel cannot be built, by the cpu engine, with one warning."""
        if self._forward is None:
            return choose.forward(self.problem(given), Inputs(*given[:3]), self.choice)
        try:
            return self._forward(given)
        except TooLarge:
            problem, inputs = self.problem(given), Inputs(*given[:3])
            result = choose.forward(problem, inputs, self.choice)
            self._forward = None
            with suppress(BackendError):  # with the tiles that were found
                self._forward = self._engine.prepare(problem, inputs)
            return result
        except BackendError as error:
            other = choose.instead(error, self.choice)
            return choose.forward(self.problem(given), Inputs(*given[:3]), other)

    def backward(self, given: Operands, saved: Saved) -> Gradients:
        """Gradients, by the engine that served the forward."""
        if not self.is_lasting:
            return choose.backward(self.problem(given), Inputs(*given[:3]), saved, self.choice)
        key = tuple(x if x is None else _layout(x) for x in (*given[:4], *given.captures, *saved))
        try:
            run = self._backwards.get(key)
            if run is not None:
                COUNTS.memory_hits += 2
                return run(given, saved)
            problem, inputs = self.problem(given), Inputs(*given[:3])
            run = self._engine.prepare_backward(problem, inputs, saved)
            if run is None:
                return choose.backward(problem, inputs, saved, self.choice)
            return self._backwards.keep(key, run)(given, saved)
        except TooLarge:
            problem, inputs = self.problem(given), Inputs(*given[:3])
            gradients = choose.backward(problem, inputs, saved, self.choice)
            self._backwards.pop(key, None)
            with suppress(BackendError):  # with the tiles that were found
                run = self._engine.prepare_backward(problem, inputs, saved)
                if run is not None:
                    self._backwards.keep(key, run)
            return gradients
        except BackendError as error:
            other = choose.instead(error, self.choice)
            return choose.backward(self.problem(given), Inputs(*given[:3]), saved, other)


def _layout(x: Tensor) -> Hashable:
    """What a kernel's text or fixed arguments may depend on: hooks of saved tensors change it."""
    return x.stride(), x.dtype, x.data_ptr() % 16, x.is_neg()
