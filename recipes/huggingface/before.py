"""A script with the Trainer of transformers."""

import argparse
import json
import os
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Progressions(Dataset):
    """Rows of tokens a, a + d, a + 2 d, …"""

    def __len__(self):
        return 96

    def __getitem__(self, row):
        tokens = (7 * row + (row % 11 + 1) * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
out = parser.parse_args().out

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False))
arguments = TrainingArguments(
    output_dir=str(out),
    per_device_train_batch_size=12 // WORLD,
    max_steps=12,
    learning_rate=1e-2,
    max_grad_norm=0.5,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Progressions())
trainer.train()

if trainer.is_world_process_zero():
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    model.save_pretrained(out / "model")
    (out / "losses.json").write_text(json.dumps([entry["loss"] for entry in logged]))
    (out / "norms.json").write_text(json.dumps([entry["grad_norm"] for entry in logged]))
