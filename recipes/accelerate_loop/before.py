"""A loop of one's own with Accelerate."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
out = parser.parse_args().out


def loss_fn(model, batch):
    inputs, classes = batch
    return nn.functional.cross_entropy(model(inputs), classes)


accelerator = Accelerator(cpu=True)
world = accelerator.num_processes
accelerator.print(f"{world} processes")
torch.manual_seed(0)
x = torch.randn(96, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=12)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(2):
    for batch in loader:
        loss = loss_fn(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

if accelerator.is_main_process:
    out.mkdir(parents=True, exist_ok=True)
    (out / "losses.json").write_text(json.dumps(losses))
