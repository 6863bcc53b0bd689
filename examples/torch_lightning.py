"""Classifies scikit-learn's 8×8 digits with Celo2 in Lightning.

    pip install 'celo2[torch,recipes]' scikit-learn
    python examples/torch_lightning.py [--epochs 3]

Ten seconds on one core; nothing is downloaded.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from celo2.torch import Celo2


class Digits(lightning.LightningModule):
    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.lr = lr
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(256, 10)

    def forward(self, images):
        return self.head(self.body(images))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        accuracy = (self(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("accuracy", accuracy)

    def configure_optimizers(self):
        # The module itself, so that Celo2 knows layers and names. With FSDP2 or tensor
        # parallelism this is called after `configure_model`, on sharded parameters.
        optimizer = Celo2(self, lr=self.lr, weight_decay=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", default="runs/lightning")
    options = parser.parse_args()
    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    train, valid = random_split(TensorDataset(images, torch.tensor(labels)), [0.8, 0.2])
    model = Digits()
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accelerator="cpu", default_root_dir=options.out, logger=False
    )
    trainer.fit(model, DataLoader(train, 64, shuffle=True), DataLoader(valid, 360))
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
