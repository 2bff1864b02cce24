"""One rank of test_combinations.py: trains the combinations whose numbers it is given and writes the differences."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.combinations import combinations, compared, train


def main(out: Path, numbers: list[str]) -> None:
    every = list(combinations())
    found = {number: compared(every[int(number)], *train(every[int(number)])) for number in numbers}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
