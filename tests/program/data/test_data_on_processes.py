"""Data of real processes: rows of each, datasets that are not the same, texts beside tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from on_ranks import passed

HERE = Path(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_each_process_are_trained_on_once(ranks: int, tmp_path: Path) -> None:
    """Whatever the size of a batch: each process has its rows, none has those of another."""
    passed(HERE.with_name("local_on_processes.py"), ranks, str(tmp_path))
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    every, size = list(range(23)), 4 * ranks
    steps = -(-23 // size)
    for each in found:
        for name in (
            "planned",
            "seven",
            "unsplit",
            "stream",
            "evaluation",
            "of the program",
            "padded",
        ):
            assert each[name] == every, name
        assert each["two"] == list(range(7))
        assert sorted(each["ahead"]) == every != each["ahead"]
        assert sorted(each["head"] + each["rest"]) == every
        assert "weft.Loader(…, program)" in each["without"]
    sizes = [min(size, 23 - start) for start in range(0, 23, size)]
    assert found[0]["rates"] == [*sizes, size]
    assert steps == len(sizes)


@pytest.mark.slow
def test_data_that_differ_between_processes_are_told(tmp_path: Path) -> None:
    passed(HERE.with_name("differing_on_processes.py"), 2, str(tmp_path))
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    alike = ("seeded", "own generator", "folders", "objects", "seeded stream")
    for name, told in one.items():
        if name.startswith(alike):
            assert told == "4: right", name
        elif name.startswith("late"):
            assert told.startswith("3: RankFailure: "), name
            assert "different batches" in told
        else:
            assert told.startswith("0: UserError: weft.Loader: the dataset is not the same"), name
            assert 'batch="local"' in told
            assert "do not split it by rank" in told
            assert other[name] == told
    assert len(one) == 26


@pytest.mark.slow
def test_texts_beside_tensors_are_cut_like_rows(tmp_path: Path) -> None:
    passed(HERE.with_name("texts_on_processes.py"), 2, str(tmp_path))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for batch in ("whole", "local"):
            # One more plan is for the last batch, which has two rows.
            assert found[f"loss, {batch}"] == [True, 2]
            assert found[f"lengths, {batch}"] == [True, 2]
            for name in ("returned", "read"):
                assert "split=False" in found[f"{name}, {batch}"]
        assert found["own rows"] == 2
