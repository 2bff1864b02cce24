"""Pictures of reports for the gallery: a headless Chromium opens each, pngquant keeps the pictures small.

    python examples/run_all.py --reports runs/gallery
    python examples/pictures.py runs/gallery docs/pictures/gallery

Both programs are packages of Debian, `chromium` and `pngquant`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

# For each example the strategy and the view that are shown, and how high.
SHOWN = {
    "gpt": ("hybrid", "model", 520),
    "llama": ("pipeline", "time", 420),
    "vit": ("tensor", "model", 520),
    "resnet": ("space", "time", 420),
    "bert": ("zero", "memory", 520),
    "lora": ("tensor", "model", 520),
    "moe": ("experts", "time", 420),
    "dlrm": ("columns", "model", 520),
    "gan": ("apart", "time", 420),
    "diffusion": ("pipeline", "time", 420),
    "speech": ("data", "time", 420),
}
WIDTH, MOST = 800, 60_000  # pixels; bytes of a picture


def shot(report: Path, view: str, height: int, picture: Path) -> None:
    """A view of a report as PNG, in at most 64 colours and `MOST` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.png")
        chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        taken = [f"--user-data-dir={folder}/user", f"--screenshot={raw}"]
        size = [f"--window-size={WIDTH},{height}", "--virtual-time-budget=5000"]
        address = f"{report.resolve().as_uri()}#{view}"
        subprocess.run(
            [*chromium, *taken, *size, address], check=True, timeout=120, capture_output=True
        )
        small = ["pngquant", "--force", "--speed", "1", "--strip", "--output", str(picture)]
        subprocess.run([*small, "64", str(raw)], check=True, timeout=60)
    if picture.stat().st_size > MOST:
        raise SystemExit(f"{picture} has {picture.stat().st_size} bytes, more than {MOST}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of reports.")
    parser.add_argument("reports", type=Path, help="the folder that run_all.py has written")
    parser.add_argument("pictures", type=Path, help="the folder to write to")
    asked = parser.parse_args()
    for needed in ("chromium", "pngquant"):
        if shutil.which(needed) is None:
            parser.error(f"{needed} is not installed: apt-get install {needed}")
    asked.pictures.mkdir(parents=True, exist_ok=True)
    for name, (strategy, view, height) in SHOWN.items():
        picture = asked.pictures / f"{name}.png"
        shot(asked.reports / f"{name}-{strategy}.html", view, height, picture)
        print(f"{picture}: {picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
