"""`python -m flexmod demo`: attention over packed documents of real text, timed and checked.

`demo_text` says where the text comes from. To let `--mods` name another mod, add a row to MASKS or
SCORES.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexmod import masks, mods
from flexmod.attention import flex_attention
from flexmod.blocks import BlockMask, create_block_mask
from flexmod.blocks.draw import LEGEND, draw_tiles
from flexmod.demo_text import HEAD_DIM, HEADS, Text, make_inputs, pack_documents
from flexmod.explain import explain
from flexmod.program import Program, trace
from flexmod.progress import Progress
from flexmod.testing import naive

SUMMARY = "packed documents of real text through document + causal + ALiBi + softcap attention"
SAMPLE = 48  # rows compared with the float64 reference
SDPA_ROWS = 1024  # query rows of a dense call
SHORTEST, LONGEST = 64, 2**17  # --length


# What --mods may name, made from the packed text.
MASKS: dict[str, Callable[[Text], Callable[..., Any]]] = {
    "causal": lambda text: masks.causal(),
    "document": lambda text: masks.document(text.ids),
    "window": lambda text: masks.sliding_window(1024),
    "chunked": lambda text: masks.chunked(2048),
}
SCORES: dict[str, Callable[[Text], Callable[..., Any]]] = {
    "alibi": lambda text: mods.alibi(HEADS, device=text.ids.device),
    "softcap": lambda text: mods.softcap(20.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    known = ", ".join([*MASKS, *SCORES])
    parser.add_argument("--device", type=_device, help="cpu, cuda, cuda:1; default: a GPU if any")
    parser.add_argument(
        "--length", type=_length, default=16384, help="tokens, default 16384", metavar="N"
    )
    parser.add_argument(
        "--mods",
        type=_names,
        default="document,causal,alibi,softcap",
        help=f"comma-separated, score mods in the order they apply; of {known}; "
        "default document,causal,alibi,softcap",
    )


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None
    return device


def _length(text: str) -> int:
    if not text.isdecimal() or not SHORTEST <= int(text) <= LONGEST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens from {SHORTEST} to {LONGEST}"
        )
    return int(text)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MASKS and name not in SCORES:
            known = ", ".join([*MASKS, *SCORES])
            raise argparse.ArgumentTypeError(f"{name!r} is none of {known}")
    return names


def run_dense(
    inputs: tuple[Tensor, Tensor, Tensor], block_mask: BlockMask, progress: Progress
) -> tuple[float, int]:
    """Seconds of torch's scaled_dot_product_attention with a bool mask, and how many are visible.

    Slices of query rows at a time, so that the mask fits into memory. It gets no score_mod (it
    takes none), and making the mask is not counted.
    """
    query, key, value = inputs
    seconds, seen = 0.0, 0
    for rows in torch.arange(query.shape[2], device=query.device).split(SDPA_ROWS):
        visible = block_mask.visible_rows(rows)
        part = query[:, :, rows[0] : rows[-1] + 1]
        attend = partial(scaled_dot_product_attention, part, key, value, attn_mask=visible)
        seconds += timed(attend)[1]
        seen += int(visible.sum())
        progress.show(f"dense SDPA, {int(rows[-1]) + 1:,} of {query.shape[2]:,} rows")
    return seconds, seen


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call and its seconds, a GPU's own work included."""
    _wait()
    start = time.perf_counter()
    result = call()
    _wait()
    return result, time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Measured:
    """What a run found. Times in seconds."""

    engine: str | None
    block_mask: BlockMask
    trace_seconds: float
    map_seconds: float
    first_seconds: float
    seconds: float
    dense_seconds: float
    visible: int  # query-key pairs
    error: float


def run(options: argparse.Namespace) -> int:
    """The whole demo; prints a table and a picture."""
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    progress = Progress()
    progress.show("packing documents")
    text = pack_documents(options.length, device)
    inputs = make_inputs(text, torch.bfloat16 if device.type == "cuda" else torch.float32)
    mask_mod = masks.and_masks(*(MASKS[n](text) for n in options.mods if n in MASKS))
    chosen = [SCORES[n](text) for n in options.mods if n in SCORES]
    found = measure(inputs, masks.compose(*chosen) if chosen else None, mask_mod, progress)
    progress.show("")
    for label, value in describe(options.mods, text, inputs, found):
        print(f"{label:<12}{value}")
    print("\nblock map: queries down, keys across")
    print(_framed(draw_tiles(found.block_mask.tiles()[0, 0])))
    print(LEGEND)
    return 0


def measure(
    inputs: tuple[Tensor, Tensor, Tensor],
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any],
    progress: Progress,
) -> Measured:
    device, length = inputs[0].device, inputs[0].shape[2]
    progress.show("tracing")
    (score, mask), trace_seconds = timed(partial(_trace_both, score_mod, mask_mod, device))
    progress.show("deciding blocks")
    block_mask, map_seconds = timed(
        partial(create_block_mask, mask, None, None, length, length, device)
    )
    engine = explain(*inputs, score, block_mask).engine
    progress.show(f"attention on {engine}")
    attend = partial(flex_attention, *inputs, score, block_mask)
    _, first_seconds = timed(attend)
    out, seconds = timed(attend)
    dense_seconds, visible = run_dense(inputs, block_mask, progress)
    progress.show("float64 reference")
    error = largest_error(inputs, out, score_mod, mask_mod)
    return Measured(
        engine,
        block_mask,
        trace_seconds,
        map_seconds,
        first_seconds,
        seconds,
        dense_seconds,
        visible,
        error,
    )


def _trace_both(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any], device: torch.device
) -> tuple[Program | None, Program]:
    score = trace(score_mod, "score", device=device) if score_mod is not None else None
    return score, trace(mask_mod, "mask", device=device)


def describe(
    names: list[str], text: Text, inputs: tuple[Tensor, Tensor, Tensor], found: Measured
) -> list[tuple[str, str]]:
    """The rows of the table."""
    length, dtype = len(text.tokens), str(inputs[0].dtype).removeprefix("torch.")
    empty, some, full = found.block_mask.counts()
    blocks, size = empty + some + full, " x ".join(map(str, found.block_mask.block_size))
    percent = "{:,} ({:.1f} %)".format
    return [
        ("attention", f"{' + '.join(names) or 'dense'}; {HEADS} heads of {HEAD_DIM}, {dtype}"),
        ("engine", f"{found.engine} on {_device_name(text.ids.device)}"),
        ("tokens", f"{length:,} bytes of Python's standard library"),
        ("documents", f"{len(text.names)}: {_shortened(text.names)}"),
        ("blocks", f"{blocks:,} of {size} tokens"),
        ("  empty", f"{percent(empty, 100 * empty / blocks)}: skipped"),
        ("  partial", f"{percent(some, 100 * some / blocks)}: mask evaluated"),
        ("  full", f"{percent(full, 100 * full / blocks)}: mask not needed"),
        ("density", f"{100 * found.visible / length**2:.2f} % of all query-key pairs are visible"),
        ("tracing", f"{found.trace_seconds * 1e3:,.1f} ms, what torch loads for it included"),
        ("block map", f"{found.map_seconds * 1e3:,.1f} ms"),
        (
            "flexmod",
            f"{found.seconds * 1e3:,.1f} ms (first call {found.first_seconds * 1e3:,.1f} ms)",
        ),
        (
            "dense SDPA",
            f"{found.dense_seconds * 1e3:,.1f} ms with a ready-made bool mask and no score mods, "
            f"{min(SDPA_ROWS, length):,} rows a call",
        ),
        ("speed-up", f"{found.dense_seconds / found.seconds:.1f} x against dense SDPA"),
        ("error", f"{found.error:.1e} at most, on {min(SAMPLE, length)} rows, against float64"),
    ]


def largest_error(
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any],
) -> float:
    """Of `out` on SAMPLE rows, against masked softmax by its definition in float64."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(out.shape[2], generator=generator)[:SAMPLE].sort().values.to(out.device)
    expected, _, _ = naive(*inputs, score_mod, mask_mod, rows=rows)
    return float((out[:, :, rows].double() - expected).abs().max())


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads"


def _shortened(names: list[str], shown: int = 4) -> str:
    rest = [f"... {len(names) - shown} more"] if len(names) > shown else []
    return ", ".join(names[:shown] + rest)


def _framed(picture: str) -> str:
    lines = picture.splitlines()
    edge = "─" * len(lines[0])
    return "\n".join([f"┌{edge}┐", *(f"│{line}│" for line in lines), f"└{edge}┘"])
