"""Parts of segments through Inductor: what is asked of torch, what is chosen, what stays as it is."""

from __future__ import annotations

import copy
import os
import shutil
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import build
import weft
from build import ref
from weft.errors import UserError
from weft.ir.plan import Compute, LocalInput, LocalValue, RankPlan
from weft.runtime.compiled import choice as kernel_choice
from weft.runtime.compiled import inductor, parts
from weft.runtime.compiled.choice import Code, KernelChoice, KernelInput, Measured, choose
from weft.runtime.compiled.parts import PartCutter
from weft.runtime.kernels.generated import build_kernel

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """One folder for all tests here, so that torch's headers are compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Path(os.environ["WEFT_CACHE"])


call = partial(build.call, shape=(4, 6))


CALLS = (
    call("aten.mul.Tensor", (ref("x"), 2.0), "a"),
    call("aten.add.Tensor", (ref("a"), ref("x")), "b"),
    call("aten.relu.default", (ref("b"),), "c"),
    call("weft.after", (ref("c"), ref("c")), "d"),
    call("weft.slice", (ref("d"), 0, 1, 2), "e", shape=(2, 6)),
    call("aten.exp.default", (ref("e"),), "f", shape=(2, 6)),
    call("aten.neg.default", (ref("f"),), "g", shape=(2, 6)),
)


def cutter(monkeypatch, seen, calls=CALLS, acts=1, x=None):
    """The parts of calls, "compiled" into their own ATen code, each noted in `seen`."""

    def chosen(code, kernels, least):
        def boxed(inputs):
            tensors = tuple(inputs)
            inputs.clear()
            return code.function(*tensors)

        seen.append(code)
        return KernelChoice(boxed)

    monkeypatch.setattr(parts, "choose", chosen)
    x = torch.zeros(6, 4).t() if x is None else x
    inputs = (LocalInput(LocalValue("x", tuple(x.shape), "float32"), "parameter", "x"),)
    plan = RankPlan(0, inputs, (Compute(0, calls, ("x",), ("b",), acts=acts),), ())
    return PartCutter(plan, CPU, {"x": x}, "inductor")


def cut_of(parts: PartCutter, outputs):
    """The cut of the only segment."""
    (segment,) = parts.plan.actors
    return parts.cut(segment, outputs)


def test_ops_of_weft_stay_between_parts(monkeypatch):
    seen: list[Any] = []
    cut = cut_of(cutter(monkeypatch, seen), ("b", "g"))
    assert [node.op for node in cut.nodes] == ["part.0", "weft.after", "part.1"]
    kernel = build_kernel(CALLS, ("b", "g"), CPU, cut=cut)
    assert "inputs = [a0]\n    del a0\n    (v1, v2,) = part0(inputs)" in kernel.source
    x = torch.randn(6, 4).t()
    plain = build_kernel(CALLS, ("b", "g"), CPU).function(None, x)
    for ours, theirs in zip(kernel.function(None, x), plain, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert [code.inputs[0].stride for code in seen] == [(1, 4), (1, 4)]


def test_inputs_that_lie_otherwise_run_as_aten_code(monkeypatch):
    cut = cut_of(cutter(monkeypatch, []), ("b", "g"))
    part = cut.functions["part.0"]
    part._compiled = None  # would raise
    (b, c) = part([torch.ones(4, 6)])
    assert b.tolist() == c.tolist() == [[3.0] * 6] * 4


def test_small_parts_stay_calls(monkeypatch):
    monkeypatch.setattr(parts, "FEWEST_CALLS", 4)
    cut = cut_of(cutter(monkeypatch, []), ("b", "g"))
    assert list(cut.nodes) == list(CALLS)


def test_products_that_are_summed_over_a_step_stay_so(monkeypatch):
    calls = (
        call("aten.mul.Tensor", (ref("x"), 2.0), "a", shape=(4, 4)),
        call("aten.exp.default", (ref("a"),), "e", shape=(4, 4)),
        call("aten.neg.default", (ref("e"),), "b", shape=(4, 4)),
        call("weft.accumulate_mm", (ref("a"), ref("x")), "s", shape=(4, 4)),
    )
    part, total = cut_of(cutter(monkeypatch, [], calls, 2, torch.zeros(4, 4)), ("b", "s")).nodes
    assert (part.op, total.op) == ("part.0", "weft.accumulate_mm")
    assert total.args == (ref("a"), ref("x"))
    assert [value.name for value in part.makes] == ["a", "b"]


def code(source, function=lambda x: (x + 1,), size=8):
    spec = KernelInput((size, size), (size, 1), torch.float32, CPU)
    return Code(source, function, (spec,))


class ProductClock(TorchDispatchMode):
    """A clock on which a product takes 10 ms, and all else nothing."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.now += 0.01 * (func is torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def clock(monkeypatch):
    clock = ProductClock()
    monkeypatch.setattr(kernel_choice, "time", clock)
    with clock:
        yield


@pytest.mark.usefixtures("clock")
def test_the_faster_is_chosen_and_remembered(monkeypatch):
    measured = []

    def compare(*_):
        measured.append(1)
        return Measured(3.0, seconds)

    monkeypatch.setattr(kernel_choice, "_compiled", lambda code: "compiled")
    monkeypatch.setattr(kernel_choice, "compare", compare)
    seconds = 2.0
    assert choose(code("fast"), "auto") == KernelChoice("compiled", 3.0, 2.0)
    assert choose(code("fast"), "auto") == KernelChoice("compiled", 3.0, 2.0)
    assert len(measured) == 1
    seconds = 2.8  # noise is larger than that
    assert choose(code("slow"), "auto").compiled is None
    monkeypatch.setattr(kernel_choice, "_compiled", None)  # would raise: nothing is compiled again
    assert choose(code("slow"), "auto") == KernelChoice(None, 3.0, 2.8)


@pytest.mark.usefixtures("clock")
def test_parts_that_cannot_pay_are_not_compiled(monkeypatch):
    monkeypatch.setattr(kernel_choice, "_compiled", None)  # would raise
    products = code("products", lambda x: ((x @ x) @ x,))
    assert choose(products, "auto").problem == "nothing to fuse"
    assert choose(code("short"), "auto", least=60.0).problem == "too short"
    # That is said of a program, and not remembered.
    monkeypatch.setattr(kernel_choice, "_compiled", lambda code: "compiled")
    monkeypatch.setattr(kernel_choice, "compare", lambda *_: Measured(3.0, 2.0))
    assert choose(code("short"), "auto").compiled == "compiled"


def test_ranks_that_cut_elsewhere_choose_alike():
    one, other = (code(f"    v1 = weft_slice(a0, 0, {offset}, 4)\n") for offset in (0, 4))
    assert one.kind() == other.kind()
    assert one.key() != other.key()
    assert one.kind() != code("    v1 = weft_slice(a1, 0, 0, 4)\n").kind()
    assert code("    v1 = mul(a0, 2.0)").kind() != code("    v1 = mul(a0, 3.0)").kind()


@compiles
def test_what_was_compiled_is_kept_and_run_when_it_is_private(monkeypatch, folder):
    kept = code("kept", lambda x: (torch.ops.aten.exp.default(x) + 1,))
    first = choose(kept, "inductor").compiled
    file = folder / "kernels" / f"{kept.key()}.py"
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    # Torch's headers too are compiled for this folder, not for one of a known name in /tmp.
    assert list((folder / "inductor" / "precompiled_headers").glob("*.gch"))
    made = []
    compiled = SimpleNamespace(source=None, function=None)
    monkeypatch.setattr(kernel_choice, "compile_boxed", lambda *_: made.append(1) or compiled)
    x = torch.randn(8, 8)
    again = choose(kept, "inductor").compiled
    inputs = [x]
    assert torch.equal(again(inputs)[0], first([x])[0])
    assert inputs == []
    assert not made
    file.chmod(0o666)  # anybody could have written it
    choose(kept, "inductor")
    assert made


def test_what_inductor_cannot_lower_is_aten_code_and_told(monkeypatch):
    def fails(*_):
        raise RuntimeError("no lowering\nmore")

    monkeypatch.setattr(kernel_choice, "compile_boxed", fails)
    told = KernelChoice(None, problem="RuntimeError: no lowering")
    kernel_choice._warn.cache_clear()
    with pytest.warns(UserWarning, match=r'"inductor" runs a part .* as ATen code.*no lowering'):
        assert choose(code("odd"), "inductor") == told
    assert choose(code("odd"), "inductor") == told  # another warning would be an error
    assert choose(code("odd"), "auto") == told
    monkeypatch.setattr(kernel_choice, "compile_boxed", None)  # would say something else
    assert choose(code("odd"), "auto") == told


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(kernel_choice, "missing_compiler", lambda _: "there is no C++ compiler")
    assert kernel_choice.usable_kernels("aten", "cpu") == "aten"
    with pytest.warns(UserWarning, match="runs ATen code: there is no C\\+\\+ compiler"):
        assert kernel_choice.usable_kernels("auto", "cpu") == "aten"
    with pytest.raises(UserError, match="is not available: there is no C\\+\\+ compiler"):
        kernel_choice.usable_kernels("inductor", "cpu")
    with pytest.raises(UserError, match="got \"fast\"|got 'fast'"):
        kernel_choice.usable_kernels("fast", "cpu")


@compiles
def test_compiled_results_lie_as_those_of_the_function():
    """What weft asks of torch's private interfaces."""

    def function(x, w):
        y = torch.ops.aten.mm.default(x, torch.ops.aten.t.default(w))
        return torch.ops.aten.relu.default(y), torch.ops.aten.t.default(x), y.t().clone()

    x, w = torch.randn(4, 6), torch.randn(5, 6)
    with FakeTensorMode() as mode:
        examples = [mode.from_tensor(each) for each in (x, w)]
    compiled = inductor.compile_boxed(function, examples)
    inputs = [x, w]
    ours = compiled.function(inputs)
    assert inputs == []
    assert ours[1].data_ptr() == x.data_ptr()
    for one, other in zip(ours, function(x, w), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert one.stride() == other.stride()


@compiles
def test_a_function_that_computes_nothing_is_no_code():
    x = torch.randn(4, 6)
    with FakeTensorMode() as mode:
        compiled = inductor.compile_boxed(lambda x: (x,), [mode.from_tensor(x)])
    assert compiled.source is None
    assert compiled.function([x])[0] is x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.thorough
@compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_with_compiled_layers_equals_the_plain_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(6)), nn.Dropout(0.2))
    batch = torch.randn(4, 8)
    losses, kinds = {}, {}
    for kernels in ("aten", "inductor"):
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        with weft.local_world(2):
            program = weft.compile(
                own,
                lambda model, x: model(x).square().sum(),
                optimizer,
                batch,
                placement=weft.placement("cpu", [0, 1]),
                seed=1,
                kernels=kernels,
            )
            losses[kernels] = [float(program.step(batch)) for _ in range(3)]
            kinds[kernels] = program.explain(details=True)
            program.close()
    assert losses["inductor"] == pytest.approx(losses["aten"], rel=1e-4)
    assert "kernels" not in kinds["aten"]
    assert "Inductor" in kinds["inductor"]
