"""Two score mods, one after the other, and what they do to the weights of one query.

Draws a picture if matplotlib is installed: `python examples/softcap_alibi.py weights.png`.
"""

from __future__ import annotations

import sys

import torch

import flexmod
from flexmod import masks, mods

LENGTH, HEADS = 128, 4


def weights(query: torch.Tensor, key: torch.Tensor, score_mod: object) -> torch.Tensor:
    """Softmax weights [HEADS, LENGTH] of the last query: attention whose values are one-hot."""
    one_hot = torch.eye(LENGTH).expand(1, HEADS, -1, -1)
    out = flexmod.flex_attention(query, key, one_hot, score_mod, masks.causal())
    return out[0, :, -1]


def main(picture: str | None = None) -> None:
    torch.manual_seed(0)
    query, key = 2 * torch.randn(2, 1, HEADS, LENGTH, 32)
    chained = mods.softcap(5.0), mods.alibi(HEADS)
    rows = {
        "plain": weights(query, key, None),
        "softcap": weights(query, key, chained[0]),
        "softcap, then alibi": weights(query, key, flexmod.compose(*chained)),
    }
    for name, row in rows.items():
        near = row[0, -16:].sum()
        print(f"{name:<20} head 0: largest weight {row[0].max():.2f}, last 16 keys {near:.2f}")
    if picture is not None:
        draw(rows, picture)


def draw(rows: dict[str, torch.Tensor], path: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(rows), sharex=True, figsize=(8, 6))
    for axis, (name, row) in zip(axes, rows.items(), strict=True):
        axis.bar(range(LENGTH), row[0].tolist(), width=1.0)
        axis.set_title(f"{name}, head 0")
    axes[-1].set_xlabel("key position")
    figure.tight_layout()
    figure.savefig(path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
