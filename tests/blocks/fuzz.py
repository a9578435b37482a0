"""Random masks against their block maps, block by block.

    python tests/blocks/fuzz.py --count 20000 --seed 0 --jobs 2

A mask is a function made of closures. It runs untraced on whole index tensors for the truth, and
is traced for the map. Every number comes from the seed, so a failure names its case.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import flexmod

At = dict[str, Any]  # b, h, q_idx, kv_idx: traced values or tensors
Part = Callable[[At], Any]
_PART = 100  # masks that a process is given at a time


class Writer:
    """Writes one random mask."""

    def __init__(self, rng: random.Random, extents: tuple[int, int, int, int]) -> None:
        self.rng = rng
        self.extents = extents
        self.generator = torch.Generator().manual_seed(rng.randrange(2**40))

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def draw(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def truth(self, depth: int) -> Part:
        rng = self.rng
        if depth > 0 and rng.random() < 0.6:
            x, y = self.truth(depth - 1), self.truth(depth - 1)
            join = self.pick(
                lambda p, q: p & q, lambda p, q: p | q, lambda p, q: p ^ q, lambda p, q: p & ~q,
                lambda p, q: torch.where(p, q, ~q),
            )  # fmt: skip
            return lambda at: join(x(at), y(at))
        kind = rng.random()
        if kind < 0.15:
            return self.documents()
        if kind < 0.22:
            flags, index = self.draw(0, 2, rng.randrange(1, 40)).bool(), self.number(1)
            return lambda at: flags[index(at) % len(flags)]
        if kind < 0.27:
            grid = self.draw(0, 2, 5, 7).bool()
            size = rng.randrange(1, 9)
            return lambda at: grid[at["q_idx"] // size % 5, at["kv_idx"] // size % 7]
        if kind < 0.4:
            x, y = self.real(2), self.real(1)
        elif kind < 0.7:
            return self.near(self.pick("lt", "le", "gt", "ge", "eq", "ne"))
        else:
            x, y = self.number(2), self.number(2)
        compare = getattr(torch, self.pick("lt", "le", "gt", "ge", "eq", "ne"))
        return lambda at: compare(x(at), y(at))

    def near(self, name: str) -> Part:
        """Distance of query and key against a constant: what real masks are made of."""
        limit, period = self.rng.randrange(-40, 40), self.rng.randrange(1, 9)
        compare = getattr(torch, name)
        if self.rng.random() < 0.3:
            return lambda at: compare((at["q_idx"] - at["kv_idx"]) % period, limit % period)
        return lambda at: compare(at["q_idx"] - at["kv_idx"], limit)

    def documents(self) -> Part:
        batch, _, q_len, kv_len = self.extents
        ids = self.draw(0, self.rng.randrange(1, 7), batch, max(q_len, kv_len))
        if self.rng.random() < 0.7:
            ids = ids.sort(-1).values
        if self.rng.random() < 0.5:
            return lambda at: ids[at["b"], at["q_idx"]] == ids[at["b"], at["kv_idx"]]
        row = ids[0].clone()
        return lambda at: row[at["q_idx"]] >= row[at["kv_idx"]]

    def number(self, depth: int) -> Part:
        rng = self.rng
        if depth == 0 or rng.random() < 0.25:
            name = self.pick("b", "h", "q_idx", "kv_idx", "q_idx", "kv_idx")
            return lambda at: at[name]
        x, y = self.number(depth - 1), self.number(depth - 1)
        constant = self.pick(rng.randrange(-9, 40), rng.randrange(-70, 70), 10**9)
        divisor = self.pick(1, 2, 3, 4, 7, 8, 16, -1, -3, -4)
        table = self.draw(-9, 40, rng.randrange(1, 50)).to(self.pick(torch.int64, torch.int32))
        return self.pick(
            lambda at: x(at) + y(at), lambda at: x(at) - y(at), lambda at: x(at) * y(at),
            lambda at: x(at) + constant, lambda at: constant - x(at), lambda at: x(at) * constant,
            lambda at: x(at) // divisor, lambda at: x(at) % divisor, lambda at: -x(at),
            lambda at: torch.minimum(x(at), y(at)), lambda at: torch.maximum(x(at), y(at)),
            lambda at: torch.abs(x(at)), lambda at: torch.clamp(x(at), -5, 20),
            lambda at: torch.where(x(at) > y(at), x(at), y(at) + 1),
            lambda at: table[x(at) % len(table)], lambda at: table[x(at) % len(table) - len(table)],
            lambda at: x(at) ^ y(at), lambda at: x(at) & 13, lambda at: x(at) | y(at),
        )  # fmt: skip

    def real(self, depth: int) -> Part:
        x = self.number(max(depth - 1, 0))
        scale = self.pick(0.1, 0.5, -1.7, 3.0)
        table = torch.rand(self.rng.randrange(1, 40), generator=self.generator) * 9 - 3
        return self.pick(
            lambda at: x(at) * scale, lambda at: x(at) / 3, lambda at: torch.sqrt(x(at) * scale),
            lambda at: torch.sin(x(at) * scale), lambda at: torch.exp(x(at) * -0.1),
            lambda at: torch.floor(x(at) * scale), lambda at: table[x(at) % len(table)],
            lambda at: torch.log(x(at) * 1.0), lambda at: 1.0 / (x(at) * 1.0),
        )  # fmt: skip


def check(seed: int) -> None:
    """One mask, one shape, one block size.

    Raises:
        AssertionError: the map calls a block what its elements are not.
    """
    rng = random.Random(seed)
    extents = (rng.randrange(1, 4), rng.randrange(1, 4), rng.randrange(1, 90), rng.randrange(1, 90))
    size = tuple(rng.choice((1, 3, 4, 8, 16, 32)) for _ in range(2))
    part = Writer(rng, extents).truth(rng.randrange(4))

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return part({"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx})

    axes = [torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate(extents)]
    seen = mask_mod(*axes).expand(extents)
    made = flexmod.create_block_mask(mask_mod, *extents, "cpu", BLOCK_SIZE=size)
    assert torch.equal(made.tiles(), kinds(seen, size)), f"seed {seed}: {extents} in {size}"
    turned = made.transposed.tiles(made.grid.rows).view(-1, made.grid.columns, made.grid.rows)
    assert torch.equal(turned.mT, made.runs.tiles(made.grid.columns).view(turned.mT.shape)), seed


def kinds(seen: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Block kinds by brute force, int8; a block that an end cuts short is never full."""
    short = [-n % s for n, s in zip(seen.shape[2:], size, strict=True)]
    padded = torch.nn.functional.pad(seen, (0, short[1], 0, short[0]), value=False)
    blocks = padded.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0])).transpose(3, 4)
    some, every = blocks.flatten(-2).any(-1), blocks.flatten(-2).all(-1)
    return (some.int() + every.int()).to(torch.int8)


def check_many(seeds: range) -> list[str]:
    """What is wrong, a line a seed."""
    torch.set_num_threads(1)
    wrong = []
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    start, wrong, last = time.perf_counter(), 0, options.seed + options.count
    parts = [range(n, min(n + _PART, last)) for n in range(options.seed, last, _PART)]
    with ProcessPoolExecutor(options.jobs) as pool:
        for found in pool.map(check_many, parts):
            wrong += len(found)
            for text in found:
                print(text, flush=True)
    took = time.perf_counter() - start
    print(f"{options.count} masks, {wrong} wrong, {took:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
