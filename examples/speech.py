"""A recurrent speech model: dialled numbers are written down from the sound of their tones.

    weft run -n 2 examples/speech.py --strategy pipeline

The recordings are made here: two tones for each digit, as telephones dial, with noise. A convolution and an LSTM in
both directions read their spectrograms, and CTC compares what they write with the digits, of which nobody says when
they sound. Pipeline: the net is cut into two stages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gallery import Plain, Run
from torch import Tensor, nn
from torch.nn.functional import ctc_loss, relu

import weft

Batch = dict[str, Tensor]
RATE, SECONDS, DIGITS = 8000, 0.8, 4  # samples a second, length of a recording, digits in it
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz, of a telephone's keys
KEYS = [(3, 1), *((row, column) for row in range(3) for column in range(3))]  # of 0 to 9
STRATEGIES = {
    "data": weft.data_parallel(),
    "pipeline": weft.Strategy(batch={"*": weft.split(0)}, stages=2, micro_batches=4),
}


class Listener(nn.Module):
    """Spectrograms [n, 129, frames] to logits [n, frames, 11]: the ten digits, and 10 for none."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv1d(129, width, 5, padding=2)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 11)

    def forward(self, spectrograms: Tensor) -> Tensor:
        x = relu(self.conv(spectrograms)).transpose(1, 2)
        return self.head(self.lstm(x)[0])


def recording(digits: Sequence[int], generator: torch.Generator) -> Tensor:
    """Samples [RATE · SECONDS] of dialled digits: tones of 80 to 140 ms, 20 to 50 ms of silence between them."""
    sound = torch.randn(int(RATE * SECONDS), generator=generator) / 4
    begin = 0
    for digit in digits:
        drawn = torch.rand(2, generator=generator).tolist()
        begin += int(RATE * (0.02 + 0.03 * drawn[0]))
        length = int(RATE * (0.08 + 0.06 * drawn[1]))
        time, (row, column) = torch.arange(length) / RATE, KEYS[digit]
        tones = torch.tensor([ROWS[row], COLUMNS[column]], dtype=torch.float32)
        sound[begin : begin + length] += torch.sin(2 * torch.pi * tones[:, None] * time).sum(0)
        begin += length
    return sound


def dialled(steps: int, size: int = 16, seed: int = 0) -> list[Batch]:
    """Spectrograms of recordings, their digits int64 [n, DIGITS], and both lengths int64 [n]."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(10, (steps * size, DIGITS), generator=generator)
    sounds = torch.stack([recording(each, generator) for each in digits.tolist()])
    window = torch.hann_window(256)
    waves = torch.stft(sounds, 256, hop_length=160, window=window, return_complex=True)
    spectrograms = waves.abs().log1p()
    spectrograms = spectrograms - spectrograms.mean((0, 2), keepdim=True)
    spectrograms = spectrograms / spectrograms.std((0, 2), keepdim=True)
    frames = torch.full((size,), spectrograms.shape[2])
    lengths = {"frames": frames, "count": torch.full((size,), DIGITS)}
    pairs = zip(spectrograms.split(size), digits.split(size))
    return [{"x": x, "digits": y, **lengths} for x, y in pairs]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    written = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    return ctc_loss(written, batch["digits"], batch["frames"], batch["count"], blank=10)


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 250, words)
    torch.manual_seed(0)
    model = Listener()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    plain, batches = Plain(model, (loss_fn, optimizer)), dialled(run.steps)
    with run.world():
        program = weft.compile(
            model, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        (test,) = dialled(1, size=100, seed=1)
        best = program.evaluation(lambda model, batch: model(batch["x"]).argmax(-1), test)
        written = [torch.unique_consecutive(row) for row in best.step(test)]
        right = sum(
            row[row < 10].tolist() == digits.tolist()
            for row, digits in zip(written, test["digits"])
        )
        run.say(f"{right} of {len(written)} numbers of the test right")
        run.finish(program)


if __name__ == "__main__":
    main()
