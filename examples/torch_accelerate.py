"""Classifies scikit-learn's 8×8 digits with Celo2 in Hugging Face Accelerate.

    pip install 'celo2[torch,recipes]' scikit-learn
    python examples/torch_accelerate.py [--epochs 3]
or, on several devices, `accelerate launch examples/torch_accelerate.py`.

Ten seconds on one core; nothing is downloaded.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from celo2.torch import Celo2


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    set_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32) / 16
    train, valid = random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2])

    accelerator = Accelerator()
    model = make_model()
    # Made from the model before `prepare`, which exchanges parameters for sharded ones in place.
    optimizer = Celo2(model, lr=2e-3, weight_decay=0.1)
    batches = DataLoader(train, 64, shuffle=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(batches))
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)

    for epoch in range(options.epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

    with torch.no_grad():
        x, y = next(iter(accelerator.prepare(DataLoader(valid, 360))))
        right = accelerator.gather_for_metrics((model(x).argmax(-1) == y).float())
    accelerator.print(f"accuracy {right.mean():.3f}")


if __name__ == "__main__":
    main()
