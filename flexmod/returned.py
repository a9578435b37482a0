"""What a call returns beside the output."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flexmod.kernels.problem import Result


class AuxRequest(NamedTuple):
    """What to return beside the output: True for each thing wanted."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What was asked for: [B, Hq, Q] each, float32 (float64 for float64 inputs); else None.

    lse: natural logarithm of the sum of exponentials of the visible scores; -inf for none.
    max_scores: the largest visible score.
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None


def returned(
    result: Result, return_lse: bool, return_aux: AuxRequest | None
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """What a call was asked for."""
    if return_aux is not None:
        lse = result.lse if return_aux.lse else None
        return result.out, AuxOutput(lse, result.max_scores if return_aux.max_scores else None)
    return (result.out, result.lse) if return_lse else result.out
