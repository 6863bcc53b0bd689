"""Trains a character-level GPT-2 on Shakespeare, the CPU recipe of nanoGPT's README.

    python examples/nanogpt/train.py --text input.txt --out nanogpt.jsonl

trains AdamW, Muon and Celo2 at four learning rates each, then the best of each with two more seeds:
18 runs of about three minutes on one core. `--optimizers celo2 --rates 1e-3 --seeds 0` makes one
run. Only the function in OPTIMIZERS differs. A finished run is a line of OUT, and is not
repeated. docs/nanogpt.md says where the text is; several files are joined, also `.xz`.
"""

import argparse
import hashlib
import json
import lzma
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from celo2.rulefile import as_rule, digest
from celo2.torch import Celo2

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 4, 4, 128, 64, 12
STEPS, WARMUP, BETAS, DECAY, CLIP = 2000, 100, (0.9, 0.99), 0.1, 1.0
LAST = 0.1  # of the peak rate, where the cosine ends
RECORD_EVERY = 250


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH, bias=False)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.attention_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm_2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        heads = self.attention(self.norm_1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [B, N, T, H]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """GPT-2 without biases; embedding and head are one matrix."""

    def __init__(self, vocab: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight
        for name, param in self.named_parameters():
            if param.ndim == 2:  # what ends a residual branch starts smaller
                ends = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * LAYERS) if ends else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T]
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def split_parameters(model: GPT) -> tuple[list[nn.Parameter], list[nn.Parameter], list]:
    """Hidden matrices, embeddings and vectors."""
    hidden = [param for param in model.blocks.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    return hidden, [model.embed.weight, model.position.weight], vectors


def adamw(model: GPT, rate: float) -> list[torch.optim.Optimizer]:
    hidden, embeddings, vectors = split_parameters(model)
    groups = [{"params": hidden + embeddings}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=DECAY)]


def muon(model: GPT, rate: float) -> list[torch.optim.Optimizer]:
    """Muon with updates of AdamW's size on hidden matrices, AdamW on the rest."""
    hidden, embeddings, vectors = split_parameters(model)
    groups = [{"params": embeddings}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(hidden, lr=rate, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=rate, betas=BETAS, weight_decay=DECAY),
    ]


def celo2(model: GPT, rate: float) -> list[torch.optim.Optimizer]:
    return [Celo2(model, lr=rate, betas=BETAS, weight_decay=DECAY)]


OPTIMIZERS = {
    "adamw": (adamw, (1e-3, 2e-3, 4e-3, 8e-3)),
    "muon": (muon, (2e-3, 4e-3, 8e-3, 1.6e-2)),
    "celo2": (celo2, (5e-4, 1e-3, 2e-3, 4e-3)),
}


def read_text(paths: list[Path]) -> str:
    return "".join(
        lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else path.read_text()
        for path in paths
    )


def loss_of(model: GPT, windows: Tensor) -> Tensor:  # [B, T + 1]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: GPT, tokens: Tensor) -> float:
    """The mean loss over the whole validation text, in windows that follow each other."""
    windows = tokens.unfold(0, LENGTH + 1, LENGTH)
    sums = [loss_of(model, part) * len(part) for part in windows.split(128)]
    return float(sum(sums) / len(windows))


def train(make, rate: float, seed: int, tokens: Tensor, vocab: int, steps: int) -> dict:
    """One run: its final validation loss, and both losses on the way."""
    torch.manual_seed(seed)
    model, draw = GPT(vocab), torch.Generator().manual_seed(seed)
    text, held_out = tokens.split([int(0.9 * len(tokens)), len(tokens) - int(0.9 * len(tokens))])
    optimizers = make(model, rate)  # the only line that differs
    losses, curve = [], []
    for step in range(steps):
        past = (step - WARMUP) / max(1, steps - WARMUP)
        cosine = LAST + (1 - LAST) * (1 + math.cos(math.pi * past)) / 2
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate * ((step + 1) / (WARMUP + 1) if step < WARMUP else cosine)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        loss = loss_of(model, text[starts + torch.arange(LENGTH + 1)])
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if (step + 1) % RECORD_EVERY == 0 or step + 1 == steps:
            recent = losses[-RECORD_EVERY:]
            curve.append([step + 1, sum(recent) / len(recent), validate(model, held_out)])
    return {"valid_loss": curve[-1][2], "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=Path("nanogpt.jsonl"))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--rates", type=float, nargs="+", help="in place of each one's own")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    text = read_text(options.text)
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[c] for c in text])
    facts = {"steps": options.steps, "text": hashlib.sha256(text.encode()).hexdigest()}
    facts |= {"torch": torch.__version__}
    known = options.out.read_text().splitlines() if options.out.exists() else []
    records = {key_of(row): row for row in map(json.loads, known)}

    def run(name: str, rate: float, seed: int) -> float:
        row = {"optimizer": name, "rate": rate, "seed": seed, **facts}
        if name == "celo2":
            row["rule"] = digest(as_rule("celo2"))
        if key_of(row) not in records:
            make = OPTIMIZERS[name][0]
            row |= train(make, rate, seed, tokens, len(characters), options.steps)
            records[key_of(row)] = row
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        loss = records[key_of(row)]["valid_loss"]
        print(f"{name:6} rate {rate:<6g} seed {seed}: validation loss {loss:.4f}", flush=True)
        return loss

    for name in options.optimizers:
        first, *others = options.seeds
        tried = {rate: run(name, rate, first) for rate in options.rates or OPTIMIZERS[name][1]}
        for seed in others:  # of the best rate only
            run(name, min(tried, key=tried.__getitem__), seed)


def key_of(row: dict) -> tuple:
    names = ("optimizer", "rate", "seed", "steps", "text", "rule")
    return tuple(row.get(name) for name in names)


if __name__ == "__main__":
    main()
