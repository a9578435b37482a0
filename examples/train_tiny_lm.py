"""Train a small byte-level language model on real text, on a laptop's CPU in a minute.

Excerpts of the standard library's sources are packed into one row, without padding. Each token sees
the last WINDOW tokens of its own excerpt; scores are capped, and a learned bias for each head and
distance is all that the model knows of positions:

    python examples/train_tiny_lm.py --steps 200 --picture loss.png
    python examples/train_tiny_lm.py --device cuda --length 16384
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import flexmod
from flexmod import demo_text, masks, mods

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, 2  # tokens are bytes
WINDOW, REACH, CAP = 128, 64, 20.0  # REACH: distances with a bias of their own
CORPUS, EXCERPTS = 1_000_000, 4  # bytes; excerpts in a row
RATE, WARMUP = 3e-3, 20


class Block(nn.Module):
    """Attention and a two-layer network, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_network = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.project, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.bias = nn.Parameter(torch.zeros(HEADS, 2 * REACH - 1))
        self.sink = nn.Parameter(torch.zeros(HEADS))  # lets a head attend to nothing

    def forward(self, hidden: Tensor, mask: flexmod.BlockMask) -> Tensor:
        parts = self.project(self.before_attention(hidden)).chunk(3, -1)
        query, key, value = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in parts)
        score_mod = flexmod.compose(mods.softcap(CAP), mods.relative_bias(self.bias))
        seen = flexmod.flex_attention(query, key, value, score_mod, mask, sink=self.sink)
        hidden = hidden + self.merge(seen.transpose(1, 2).flatten(-2))
        return hidden + self.network(self.before_network(hidden))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """tokens and document ids [n] -> logits [n, VOCABULARY]."""
        mask_mod = masks.and_masks(masks.sliding_window(WINDOW), masks.document(ids))
        # Decided once a step, used by every layer.
        mask = flexmod.create_block_mask(
            mask_mod, None, None, len(tokens), len(tokens), tokens.device
        )
        hidden = self.embed(tokens)[None]
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(self.norm(hidden)[0])


def pack(corpus: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """A row of random excerpts of unequal length: tokens, next tokens and ids, all [length]."""
    cuts = torch.randperm(length - 1, generator=generator)[: EXCERPTS - 1].sort().values + 1
    lengths = torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([length])).tolist()
    starts = torch.randint(len(corpus) - length, (EXCERPTS,), generator=generator).tolist()
    tokens = torch.cat([corpus[a : a + n] for a, n in zip(starts, lengths, strict=True)])
    targets = torch.cat([corpus[a + 1 : a + n + 1] for a, n in zip(starts, lengths, strict=True)])
    device = corpus.device
    return tokens, targets, masks.document_ids(lengths, device)


def loss_of(model: Model, row: tuple[Tensor, ...]) -> Tensor:
    """Nats a byte."""
    tokens, targets, ids = row
    on_gpu = tokens.device.type == "cuda"
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=on_gpu):
        logits = model(tokens, ids)
    return nn.functional.cross_entropy(logits.float(), targets)


@torch.no_grad()
def held_out_loss(model: Model, corpus: Tensor, length: int) -> float:
    generator = torch.Generator().manual_seed(1)
    rows = [pack(corpus, length, generator) for _ in range(8)]
    return sum(float(loss_of(model, row)) for row in rows) / len(rows)


def train(model: Model, corpus: Tensor, length: int, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1 - 0.9 * step / max(steps, WARMUP + 1))
    )
    losses = []
    for step in range(steps):
        loss = loss_of(model, pack(corpus, length, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            print(
                f"step {step:>5}  loss {losses[-1]:.3f}  {'█' * round(10 * losses[-1])}", flush=True
            )
    return losses


def draw(losses: list[float], path: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4))
    axis.plot(losses, linewidth=1)
    axis.set(xlabel="step", ylabel="loss, nats a byte", title="Bytes of the standard library")
    figure.tight_layout()
    figure.savefig(path)
    print(f"picture: {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", help="where to save the loss curve")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    text = demo_text.pack_documents(CORPUS, torch.device(given.device))
    split = CORPUS - CORPUS // 10
    seen, unseen = text.tokens[:split], text.tokens[split:]
    model = Model().to(given.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text.names)} files, {CORPUS:,} bytes; {parameters:,} parameters")
    before = held_out_loss(model, unseen, given.length)
    start = time.perf_counter()
    losses = train(model, seen, given.length, given.steps)
    took = time.perf_counter() - start
    after = held_out_loss(model, unseen, given.length)
    print(f"held-out loss {before:.3f} -> {after:.3f} nats a byte, {took:.0f} s of training")
    nearest = model.blocks[0].bias.detach()[:, REACH - 1 - 8 : REACH]
    for head, row in enumerate(nearest.flip(-1).tolist()):
        print(
            f"layer 0, head {head}: bias at 0, 1, ... 8 back: {' '.join(f'{x:5.2f}' for x in row)}"
        )
    if given.picture:
        draw(losses, given.picture)


if __name__ == "__main__":
    main()
