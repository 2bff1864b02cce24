"""A LightningModule and its Trainer."""

import argparse
from pathlib import Path

import pytorch_lightning as L
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
out = parser.parse_args().out


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        inputs, classes = batch
        scores = self.layers(inputs)
        loss = nn.functional.cross_entropy(scores, classes)
        self.log("loss", loss)
        self.log("right", (scores.argmax(1) == classes).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


torch.manual_seed(0)
x = torch.randn(96, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=12)
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    strategy="auto",
    max_epochs=2,
    logger=CSVLogger(out, name="", version=""),
    log_every_n_steps=1,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), loader)
trainer.save_checkpoint(out / "last.ckpt")
