"""Trains a small byte-level transformer with AdamW and with Celo2: a plain PyTorch loop.

    python examples/torch_loop.py [--steps 150]

Half a minute on one core. The text is Python's own documentation; nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from celo2.torch import Celo2

BYTES, WIDTH, LENGTH, BATCH = 256, 64, 64, 16


class LanguageModel(nn.Module):
    def __init__(self, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:  # [B, T]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.blocks(x, mask=mask, is_causal=True))


def train(make_optimizer, text: Tensor, steps: int) -> float:
    """The mean loss of the last tenth of the steps."""
    torch.manual_seed(0)
    model, draw = LanguageModel(), torch.Generator().manual_seed(0)
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, optimizer.defaults["lr"], steps, pct_start=0.05, cycle_momentum=False
    )
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=draw)
        tokens = text[starts + torch.arange(LENGTH + 1)].long()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8)
    print(Celo2(LanguageModel(), lr=4e-3).explain())
    for name, make in {
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95)),
        "Celo2": lambda model: Celo2(model, lr=4e-3),
    }.items():
        print(f"{name}: loss {train(make, text, steps):.3f}")


if __name__ == "__main__":
    main()
