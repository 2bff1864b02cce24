"""Pictures of reports for the gallery: a headless Chromium opens each, pngquant keeps the pictures small.

    python examples/run_all.py --reports runs/gallery
    python examples/pictures.py runs/gallery docs/pictures/gallery

Both programs are packages of Debian, `chromium` and `pngquant`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

# For each example the strategy, the view, its height, and what of the model is unfolded.
SHOWN = {
    "gpt": ("hybrid", "model", 975, "blocks.3"),
    "llama": ("pipeline", "time", 620, ""),
    "vit": ("tensor", "model", 800, "layers.0"),
    "resnet": ("space", "time", 530, ""),
    "bert": ("zero", "memory", 750, ""),
    "lora": ("tensor", "model", 1075, "blocks.0"),
    "moe": ("experts", "time", 530, ""),
    "dlrm": ("columns", "model", 850, "tables"),
    "gan": ("apart", "time", 590, ""),
    "diffusion": ("pipeline", "time", 590, ""),
    "speech": ("pipeline", "time", 590, ""),
}
WIDTH, MOST = 800, 60_000  # pixels; bytes of a picture
# Leaves curves of memory without their tables, whose lines name files of the machine.
FOLD = """
<script>
for (const found of document.querySelectorAll("details")) found.open = false;
</script>
"""
# Opens a module of the tree and all that is below it, as clicks do; a list is filled after its click.
UNFOLD = """
<script>
function unfold(list, parts) {
  for (const item of list.children) {
    const name = item.querySelector("b").textContent, found = item.querySelector("details");
    if (found && (!parts.length || parts[0] === name)) {
      found.open = true;
      setTimeout(() => unfold(found.querySelector("ul"), parts.slice(1)), 100);
    }
  }
}
unfold(document.querySelector(".tree ul"), PARTS);
</script>
"""


def shot(report: Path, view: str, height: int, unfolded: str, picture: Path) -> None:
    """A view of a report as PNG, in at most 64 colours and `MOST` bytes."""
    with tempfile.TemporaryDirectory() as folder:
        raw, page = Path(folder, "raw.png"), Path(folder, "report.html")
        parts = json.dumps(unfolded.split("."))
        script = UNFOLD.replace("PARTS", parts) if unfolded else FOLD if view == "memory" else ""
        page.write_text(report.read_text() + script)
        chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        taken = [f"--user-data-dir={folder}/user", f"--screenshot={raw}"]
        size = [f"--window-size={WIDTH},{height}", "--virtual-time-budget=5000"]
        subprocess.run(
            [*chromium, *taken, *size, f"{page.as_uri()}#{view}"],
            check=True,
            timeout=300,
            capture_output=True,
        )
        small = ["pngquant", "--force", "--speed", "1", "--strip", "--output", str(picture)]
        subprocess.run([*small, "64", str(raw)], check=True, timeout=60)
    if picture.stat().st_size > MOST:
        raise SystemExit(f"{picture} has {picture.stat().st_size} bytes, more than {MOST}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures of reports.")
    parser.add_argument("reports", type=Path, help="the folder that run_all.py has written")
    parser.add_argument("pictures", type=Path, help="the folder to write to")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHOWN)}")
    asked = parser.parse_args()
    if unknown := sorted({*asked.names} - {*SHOWN}):
        parser.error(f"there is no picture {', '.join(unknown)}; there are {', '.join(SHOWN)}")
    for needed in ("chromium", "pngquant"):
        if shutil.which(needed) is None:
            parser.error(f"{needed} is not installed: apt-get install {needed}")
    asked.pictures.mkdir(parents=True, exist_ok=True)
    for name in asked.names or SHOWN:
        strategy, view, height, unfolded = SHOWN[name]
        picture = asked.pictures / f"{name}.png"
        shot(asked.reports / f"{name}-{strategy}.html", view, height, unfolded, picture)
        print(f"{picture}: {picture.stat().st_size} bytes")


if __name__ == "__main__":
    main()
