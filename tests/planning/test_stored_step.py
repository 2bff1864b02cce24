"""Graph files: what is written is read, and whatever else a file holds is told in words."""

from __future__ import annotations

import gzip
import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mutations import mutated
from planning.graph_texts import HEADER, LINEAR, linear, write
from weft.errors import UserError
from weft.planning import stored_step
from weft.planning.stored_step import StoredStep
from weft.strategy.precision import Precision
from weft.strategy.strategy import data_parallel

WITHOUT = [{**HEADER, name: None} for name in HEADER]


def full() -> StoredStep:
    return replace(
        linear(),
        device_type="cuda",
        precision=Precision("bf16", masters=True),
        apart=frozenset({"b", "a"}),
        recurrent=frozenset({"a", "b", "c"}),
        modules=("head", "head.ärger"),
        optimizers=("AdamW", "Muon"),
        torch="2.11.0",
    )


@pytest.mark.parametrize("name", ["a.graph", "a.graph.gz"])
@pytest.mark.parametrize("step", [linear(), full()], ids=["bare", "full"])
def test_what_is_saved_is_loaded(tmp_path: Path, name: str, step: StoredStep) -> None:
    step.save(tmp_path / name)
    assert StoredStep.load(tmp_path / name) == step
    first = (tmp_path / name).read_bytes()
    step.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == first


def test_only_names_with_gz_are_compressed(tmp_path: Path) -> None:
    linear().save(tmp_path / "a.graph")
    linear().save(tmp_path / "a.gz")
    text = (tmp_path / "a.graph").read_bytes()
    assert text.decode().endswith(LINEAR)
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == text


def test_the_header_is_read(tmp_path: Path) -> None:
    step = StoredStep.load(write(tmp_path / "a.graph", HEADER))
    assert (step.device_type, step.torch, step.optimizers) == ("cuda", "2.13.0", ("AdamW",))
    assert step.precision == Precision("bf16", masters=True)
    assert step.recurrent == {"lstm.weight_hh_l0"}
    assert str(step.graph) == LINEAR


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected a first line weft graph 1"),
        (b"\x89PNG\r\n", "expected a first line weft graph 1"),
        (b"weft graph 2 sha256:00\n{}\n", "'weft graph 2 sha256:00', expected format 1"),
        (b"weft graph 1 sha256:00\n{}\n", "is damaged"),
        (gzip.compress(b"weft", mtime=0)[:12], "cannot read"),
        (b"\x1f\x8b\x08 no stream", "cannot read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.graph").write_bytes(content)
    with pytest.raises(UserError, match=words):
        StoredStep.load(tmp_path / "a.graph")


def test_a_byte_that_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.graph"
    linear().save(path)
    path.write_bytes(path.read_bytes().replace(b"[16, 8]", b"[32, 8]"))
    with pytest.raises(UserError, match=r"a\.graph is damaged: its checksum"):
        StoredStep.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no graph file .*none; write it with weft capture"):
        StoredStep.load(tmp_path / "none")
    with pytest.raises(UserError, match="cannot read"):
        StoredStep.load(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        linear().save(tmp_path)
    with pytest.raises(UserError, match="cannot read .*null"):
        StoredStep.load("a\0b")
    with pytest.raises(UserError, match="cannot write .*null"):
        linear().save("a\0b")


def test_headers_with_mistakes_are_read_or_told(tmp_path: Path) -> None:
    """A file whose checksum fits."""
    header = json.dumps({**HEADER, "rules": {"own.op": {"factors": "m n -> m n", "linear": [[0]]}}})
    for broken in mutated(header.replace(", ", ", \n"), 200):
        text = f"{' '.join(broken.splitlines())}\n{LINEAR}".encode()
        content = f"weft graph 1 sha256:{hashlib.sha256(text).hexdigest()}\n".encode() + text
        (tmp_path / "a.graph").write_bytes(content)
        with suppress(UserError):  # everything else fails the test
            StoredStep.load(tmp_path / "a.graph")


def test_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear().save(tmp_path / "a.gz")
    monkeypatch.setattr(stored_step, "MAX_BYTES", 100)
    with pytest.raises(UserError, match="more than 100 bytes"):
        StoredStep.load(tmp_path / "a.gz")


def test_another_version_of_weft_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.graph", {**HEADER, "weft": "0.0.9"})
    with pytest.raises(UserError, match=r"written by weft 0\.0\.9, this is weft .*capture"):
        StoredStep.load(path)


@pytest.mark.parametrize("header", WITHOUT, ids=HEADER)
def test_a_header_without_a_field_is_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    (missing,) = (name for name, value in header.items() if value is None)
    with pytest.raises(UserError, match=f"line 2: {missing} must be .*got nothing"):
        StoredStep.load(write(tmp_path / "a.graph", header))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("[]", r"line 2 must be a mapping from names, got \[\]"),
        ("{", "line 2: "),
        ({**HEADER, "device": "tpu"}, "one of cpu, cuda, got 'tpu'"),
        ({**HEADER, "precision": {"compute": "int8"}}, "precision: compute must be .*int8"),
        ({**HEADER, "precision": {"speed": 1}}, "precision: no field is named 'speed'"),
        ({**HEADER, "modules": ["a", 1]}, r"modules\[1\] must be a text, got 1"),
        (
            {**HEADER, "rules": {"my.op": "m"}},
            "the rule of 'my.op' must be a mapping from names, got 'm'",
        ),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        StoredStep.load(write(tmp_path / "a.graph", header))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing"),
        (LINEAR.replace("= call", "= cal"), "line 4"),
        (LINEAR.replace("float32[8, 4]", "float33[8, 4]"), "float33"),
        (LINEAR.replace("(%x, %t)", "(%x, %q)"), "%q"),
    ],
)
def test_a_bad_graph_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=f"cannot be read: (.|\n)*{words}"):
        StoredStep.load(write(tmp_path / "a.graph", HEADER, text))


def test_an_op_without_a_rule_is_refused(tmp_path: Path) -> None:
    text = LINEAR.replace("aten.mm.default", "mylib.mm.default")
    with pytest.raises(UserError, match=r"the op mylib\.mm\.default has no sharding rule; declare"):
        StoredStep.load(write(tmp_path / "a.graph", HEADER, text))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_text_is_read_or_told(tmp_path: Path, data: st.DataObject) -> None:
    """A file whose checksum fits, with some piece of its graph put in place of another."""
    start, end, source = (data.draw(st.integers(0, len(LINEAR))) for _ in range(3))
    piece = data.draw(
        st.one_of(st.text(max_size=6), st.just(LINEAR[source : source + max(0, end - start)]))
    )
    text = LINEAR[:start] + piece + LINEAR[max(start, end) :]
    path = write(tmp_path / "a.graph", HEADER, text.encode("utf-8", "replace").decode())
    with suppress(UserError):  # everything else fails the test
        StoredStep.load(path)


def test_tensors_that_nobody_has_are_refused(tmp_path: Path) -> None:
    large = LINEAR.replace("[16, 8]", "[99999999999999999999, 8]")
    path = write(tmp_path / "a.graph", HEADER, large)
    with pytest.raises(UserError, match=r"x has the shape \(9+, 8\); capture the step again"):
        StoredStep.load(path)


def test_who_says_no_precision_takes_that_of_the_file() -> None:
    half = Precision("bf16", masters=True)
    assert full().in_precision(data_parallel()) == replace(data_parallel(), precision=half)
    other = replace(data_parallel(), precision="fp16")
    assert full().in_precision(other) == other
    assert linear().in_precision(data_parallel()) == data_parallel()
