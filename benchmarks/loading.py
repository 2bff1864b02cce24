"""Steps fed by a loader, beside steps of one batch that is there already, and beside torch's DataLoader and DDP.

    PYTHONPATH=. OMP_NUM_THREADS=1 weft run -n 1 benchmarks/loading.py --work images --workers 1
    PYTHONPATH=. OMP_NUM_THREADS=1 weft run -n 2 benchmarks/loading.py --work tokens

Images are unpacked (zlib), cropped and mirrored at random; tokens are windows of a file that is mapped into memory.
All sides take turns within the same processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

import weft
from benchmarks.measure import interleave, save
from benchmarks.works.transformers import GPT

SIDE, CUT, CLASSES = 72, 64, 10
LENGTH, WORDS = 128, 1024
SAMPLES = 1 << 20


class Images(Dataset[tuple[Tensor, int]]):
    """Packed images, by number: unpacked, cropped, mirrored and scaled when one is asked for."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        smooth = draw.integers(0, 255, (64, SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
        self._packed = [zlib.compress(each.repeat(8, 0).repeat(8, 1).tobytes()) for each in smooth]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        raw = zlib.decompress(self._packed[number % len(self._packed)])
        image = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(SIDE, SIDE, 3)
        top, left = torch.randint(SIDE - CUT + 1, (2,)).tolist()
        cut = image[top : top + CUT, left : left + CUT].permute(2, 0, 1)
        if torch.rand(()) < 0.5:
            cut = cut.flip(2)
        return cut.float() / 255 - 0.5, number % CLASSES


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a file of tokens, with the tokens that follow.

    Args:
        path: of int32 tokens.
    """

    def __init__(self, path: Path) -> None:
        self._tokens = np.memmap(path, dtype=np.int32, mode="r")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        start = number * 7919 % (len(self._tokens) - LENGTH - 1)
        window = torch.from_numpy(self._tokens[start : start + LENGTH + 1].astype(np.int64))
        return window[:-1], window[1:]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross-entropy of classes or of tokens."""
    given, wanted = batch
    return cross_entropy(model(given).flatten(0, -2), wanted.flatten())


def main() -> None:
    """Measure, print, and write `runs/bench/loading_<work>.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", choices=("images", "tokens"), required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="of a side in a round")
    o = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        sides, ends = _sides(o, Path(folder), size)
        took = interleave(sides, o.rounds, o.steps)
        for end in ends:
            end()
    if rank == 0:
        loaded = took["weft, loaded"]
        for name, each in took.items():
            ratio = median(other / own for other, own in zip(each, loaded, strict=True))
            print(
                f"{name:18} {median(each) * 1e3:8.1f} ms a step; weft's loader {ratio:.3f} x as fast"
            )
        save(f"loading_{o.work}", {"options": vars(o), "seconds": took})


def _sides(
    o: argparse.Namespace, folder: Path, size: int
) -> tuple[dict[str, Callable[[], object]], list[Callable[[], object]]]:
    """How each side makes a step, and what ends them."""
    dataset, model = _work(o.work, folder)
    own = _work(o.work, folder)[1]
    batch = default_collate([dataset[number] for number in range(o.batch)])
    program = weft.compile(
        *(model, loss_fn, torch.optim.AdamW(model.parameters(), lr=1e-4), batch),
        placement=weft.placement("cpu", range(size)),
        strategy=weft.Strategy(batch={"*": weft.split(0)}),
        kernels="aten",
    )
    loader = weft.Loader(dataset, o.batch, program, shuffle=True, drop_last=True, workers=o.workers)
    losses: Any = program.run(loader, ahead=2)
    plain, ends = _plain(o, dataset, own, size)
    sides: dict[str, Callable[[], object]] = {
        "weft, one batch": lambda: float(program.step(batch)),
        "weft, loaded": lambda: float(next(losses)),
        "torch, loaded": plain,
    }
    return sides, [losses.close, program.close, *ends]


def _work(name: str, folder: Path) -> tuple[Dataset[Any], nn.Module]:
    torch.manual_seed(0)
    if name == "images":
        return Images(), _convolutional()
    path = folder / "tokens"
    if not path.exists():
        np.random.default_rng(0).integers(0, WORDS, 1 << 22, dtype=np.int32).tofile(path)
    return Windows(path), GPT(2, 256, 4, LENGTH, WORDS)


def _convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, wider in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def _plain(
    o: argparse.Namespace, dataset: Dataset[Any], model: nn.Module, size: int
) -> tuple[Callable[[], object], list[Callable[[], object]]]:
    """A step of plain PyTorch, in DDP where there are several ranks."""
    sampler: DistributedSampler[Any] | None = None
    ends: list[Callable[[], object]] = []
    stepped = model
    if size > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
            ends.append(dist.destroy_process_group)
        sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
        stepped = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    loader = DataLoader(
        dataset,
        o.batch // size,
        sampler=sampler,
        shuffle=sampler is None,
        drop_last=True,
        num_workers=o.workers,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches: Iterator[Any] = iter(loader)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(stepped, next(batches))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, ends


if __name__ == "__main__":
    main()
