"""`weft.Precision`: masters, casts of parameters, dtypes of sums, against plain PyTorch loops with the same casts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, MLP, classification_loss, token_batch, token_loss, vector_batch
from on_ranks import passed
from program.precision_on_processes import train
from weft.errors import CaptureError, UserError
from weft.ir.logical import Box, Call, Input, LogicalGraph
from weft.layout import Partial

S, B = weft.split, weft.broadcast
P = weft.Precision
DATA = weft.data_parallel()
TENSOR = weft.tensor_parallel(
    ["blocks.*.qkv", "blocks.*.up"], ["blocks.*.proj", "blocks.*.down"], sequence=1
)
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    # Fused, as weft runs them on float32 shards: the single-tensor loops round otherwise.
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, eps=1e-4, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    # Its update looks at the whole tensor: it stays whole, master and all.
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
State = dict[str, torch.Tensor]


def batches_of(count: int = 3) -> list[dict[str, torch.Tensor]]:
    return [token_batch(8, seed=seed) for seed in range(count)]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT()


def with_masters(
    model: nn.Module, batches: list[Any], make: Make, clip: float | None = None
) -> tuple[list[float], State, State]:
    """Losses, masters and parameters of a plain loop that keeps float32 copies by hand."""
    model = copy.deepcopy(model).bfloat16()
    parameters = dict(model.named_parameters())
    masters = {name: p.detach().float() for name, p in parameters.items()}
    optimizer = make(list(masters.values()))
    losses = []
    for batch in batches:
        loss = token_loss(model, batch)
        model.zero_grad()
        loss.backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.float()
        if clip is not None:
            nn.utils.clip_grad_norm_(list(masters.values()), clip)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
        losses.append(loss.item())
    return losses, masters, dict(model.state_dict())


def with_casts(model: nn.Module, batches: list[Any], make: Make) -> tuple[list[float], State]:
    """Losses and float32 parameters of a plain loop whose forward reads them as bf16."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses = []
    for batch in batches:
        cast = {name: p.bfloat16() for name, p in model.named_parameters()}

        def lent(*args: Any, cast: State = cast) -> Any:
            return torch.func.functional_call(model, cast, args)

        loss = token_loss(lent, batch)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@contextmanager
def compiled(
    model: nn.Module,
    make: Make,
    strategy: weft.Strategy,
    ranks: Any = (0,),
    loss: Any = token_loss,
    batch: Any = None,
) -> Iterator[weft.Program]:
    placement = weft.placement("cpu", list(ranks))
    with weft.local_world(len(placement.ranks)):
        program = weft.compile(
            model,
            loss,
            make(model.parameters()),
            batches_of(1)[0] if batch is None else batch,
            placement=placement,
            strategy=strategy,
        )
        yield program
        program.close()


def strayed(found: State, expected: State, start: nn.Module) -> float:
    """How far all parameters are from where they should be, in units of how far training moved them."""
    begun = {name: p.detach().float() for name, p in start.named_parameters()}
    off = sum((found[name].float() - expected[name]).norm() ** 2 for name in begun)
    moved = sum((expected[name] - value).norm() ** 2 for name, value in begun.items())
    return float((off / moved) ** 0.5)


def apart(found: State, expected: State) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    return max(
        ((found[name] - value).abs().max() / value.abs().max()).item()
        for name, value in expected.items()
    )


def sums(graph: LogicalGraph, dims: int = 2) -> list[Box]:
    """The boxings that add up what ranks have parts of, of matrices."""
    found = []
    for box in graph.of_kind(Box):
        layout = graph.values[box.input.name].layout
        if layout is not None and Partial() in layout.sbp and len(box.output.shape) == dims:
            found.append(box)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_on_one_rank_are_those_of_a_plain_loop(name: str) -> None:
    make = OPTIMIZERS[name]
    losses, masters, state = with_masters(gpt(), batches_of(4), make)
    with compiled(gpt().bfloat16(), make, weft.Strategy(precision=P(masters=True))) as program:
        assert [program.step(batch).item() for batch in batches_of(4)] == losses
        assert apart(program.full_state_dict(masters=True), masters) == 0.0
        found = program.full_state_dict()
        assert {value.dtype for value in found.values()} == {torch.bfloat16}
        assert apart(found, state) == 0.0


# Sums of bf16 products of half the batch each: their rounding is that of bf16, 2⁻⁸.
RANKS: dict[str, tuple[Any, weft.Strategy]] = {
    "data": ((0, 1), DATA),
    "data, micro-batches": ((0, 1), replace(DATA, micro_batches=2)),
    "tensor, sequence": ((0, 1), TENSOR),
    "stages": ((0, 1), replace(DATA, stages=2, micro_batches=2)),
    "data 4, float32 sums": ((0, 1, 2, 3), replace(DATA, precision=P(reduce="fp32"))),
    **{f"zero {level}": ((0, 1), replace(DATA, zero=weft.Zero(level))) for level in (1, 2, 3)},  # type: ignore[arg-type]
    "zero 2, micro-batches as they are": (
        (0, 1),
        replace(DATA, zero=weft.Zero(2), micro_batches=2, precision=P(accumulate=None)),
    ),
    "zero 3, float32 sums": (
        (0, 1),
        replace(DATA, zero=weft.Zero(3), micro_batches=2, precision=P(reduce="fp32")),
    ),
    "zero 3, float32 sums in one go": (
        (0, 1),
        replace(DATA, zero=weft.Zero(3), precision=P(reduce="fp32")),
    ),
    "data 2 × tensor 2, zero 1": (
        ([0, 1], [2, 3]),
        replace(
            weft.hybrid_parallel(
                ["blocks.*.qkv", "blocks.*.up"], ["blocks.*.proj", "blocks.*.down"]
            ),
            zero=weft.Zero(1),
        ),
    ),
}


@pytest.mark.parametrize("name", RANKS)
def test_masters_on_several_ranks(name: str) -> None:
    """Masters differ by the rounding of bf16 gradients alone."""
    ranks, strategy = RANKS[name]
    precision = replace(strategy.precision or P(), masters=True)  # type: ignore[arg-type,type-var]
    clip = 1.0 if "zero" in name else None
    strategy = replace(strategy, precision=precision, clip_norm=clip)
    make = OPTIMIZERS["momentum"]
    losses, masters, _ = with_masters(gpt(), batches_of(), make, clip)
    with compiled(gpt().bfloat16(), make, strategy, ranks) as program:
        found = [program.step(batch).item() for batch in batches_of()]
        assert found == pytest.approx(losses, rel=2e-2)
        assert strayed(program.full_state_dict(masters=True), masters, gpt().bfloat16()) < 5e-2
        inputs = {node.key: node.value for node in program.graph.of_kind(Input)}
        for key, value in inputs.items():
            if key.endswith(".weft_master"):
                parameter = inputs[key.removesuffix(".weft_master")]
                assert (value.dtype, value.layout) == ("float32", parameter.layout)


@pytest.mark.parametrize("strategy", [weft.Strategy(), replace(DATA, zero=weft.Zero(3))])
def test_parameters_are_read_as_bf16(strategy: weft.Strategy) -> None:
    make = OPTIMIZERS["momentum"]
    losses, state = with_casts(gpt(), batches_of(), make)
    one = strategy.zero is None
    strategy = replace(strategy, precision=P(parameters="bf16", reduce="fp32"))
    with compiled(gpt(), make, strategy, (0,) if one else (0, 1)) as program:
        found = [program.step(batch).item() for batch in batches_of()]
        assert found == (losses if one else pytest.approx(losses, rel=2e-2))
        assert strayed(program.full_state_dict(), state, gpt()) <= (0 if one else 5e-2)
        moved = [box.output for box in program.graph.of_kind(Box) if len(box.output.shape) == 2]
        gathered = {value.dtype for value in moved if value.layout and B in value.layout.sbp}
        assert one or gathered == {"bfloat16"}
        evaluation = program.evaluation(token_loss, batches_of(1)[0])
        assert "bfloat16" in str(evaluation.graph)


def test_arguments_of_the_model_are_cast_too() -> None:
    """Targets of the loss are not."""
    batch = vector_batch(8, dtype=torch.float32)
    model = MLP()
    cast = {name: p.bfloat16() for name, p in model.named_parameters()}

    def lent(x: torch.Tensor) -> Any:
        return torch.func.functional_call(model, cast, (x.bfloat16(),))

    expected = classification_loss(lent, batch).item()  # type: ignore[arg-type]
    strategy = weft.Strategy(precision=P(parameters="bf16"))
    make = OPTIMIZERS["adamw"]
    with compiled(model, make, strategy, loss=classification_loss, batch=batch) as program:
        assert program.step(batch).item() == expected
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("reduce", ["bf16", "fp32"])
@pytest.mark.parametrize("level", [None, 1, 3])
@pytest.mark.parametrize("precision", ["autocast", "casts", "masters", "own"])
def test_gradients_travel_as_the_user_says(precision: str, level: Any, reduce: Any) -> None:
    """Whatever they are made in; and the optimizer reads what was summed, not what it is when rounded."""
    told = {
        "autocast": P("bf16"),
        "casts": P(parameters="bf16"),
        "masters": P(masters=True),
        "own": P(),
    }[precision]
    model = gpt().bfloat16() if precision == "masters" else gpt()
    strategy = replace(
        DATA, zero=level and weft.Zero(level), precision=replace(told, reduce=reduce)
    )
    with compiled(model, OPTIMIZERS["adamw"], strategy, (0, 1)) as program:
        graph = program.graph
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[reduce]
        assert {box.output.dtype for box in sums(graph)} == {dtype}
        assert len(sums(graph)) > 5
        if reduce == "fp32":
            boxed = {box.output.name for box in sums(graph)}
            narrowed = [
                call
                for call in graph.of_kind(Call)
                if "cast" in call.op or "_to_copy" in call.op
                if call.args[0].name in boxed
            ]
            assert not narrowed
        text = program.explain(details=True)
        assert "exchanges of a step" in text
        kind = "reduce_scatter" if level else "all_reduce"
        assert any(line.split()[:2] == [kind, dtype] for line in text.splitlines())


def difference_of_sums(reduce: Any) -> float:
    """How far a weight is from that of one rank, which is -1 in all elements, after a step of SGD.

    Every rank's part is some 1000, of both signs: 1 is lost where they are rounded to bf16.
    """
    model = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(model.weight)
    batch = torch.full((2, 64), 1000.0)
    batch[1] = -999.0

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model(batch).sum()
        return total

    strategy = replace(DATA, precision=P(reduce=reduce))
    make: Make = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
    with compiled(model, make, strategy, (0, 1), loss, batch) as program:
        program.step(batch)
        return (program.full_state_dict()["weight"] + 1.0).abs().max().item()


def test_only_who_asks_for_narrow_sums_gets_them() -> None:
    assert difference_of_sums(None) == difference_of_sums("fp32") == 0.0
    assert difference_of_sums("bf16") >= 1.0


@pytest.mark.parametrize(
    ("accumulate", "masters", "dtype"),
    [
        ("fp32", False, "float32"),
        ("fp32", True, "float32"),
        (None, False, "bfloat16"),
        (None, True, "bfloat16"),
    ],
)
def test_micro_batches_are_added_up_as_the_user_says(
    accumulate: Any, masters: bool, dtype: str
) -> None:
    strategy = replace(DATA, micro_batches=2, precision=P(accumulate=accumulate, masters=masters))
    with compiled(gpt().bfloat16(), OPTIMIZERS["adamw"], strategy) as program:
        made = [
            value.dtype
            for call in program.graph.of_kind(Call)
            for value in call.outputs
            if call.op == "weft.accumulate" and len(value.shape) == 2
        ]
        assert len(made) > 5
        assert set(made) == {dtype}


def test_zero_2_reduces_each_micro_batch_whatever_it_is_added_up_in() -> None:
    for accumulate in ("fp32", None):
        strategy = replace(
            DATA,
            zero=weft.Zero(2),
            micro_batches=4,
            precision=P(accumulate=accumulate),  # type: ignore[arg-type]
        )
        with compiled(gpt().bfloat16(), OPTIMIZERS["adamw"], strategy, (0, 1)) as program:
            graph = program.graph
            accumulated = [c for c in graph.of_kind(Call) if c.op == "weft.accumulate"]
            matrices = [c.outputs[0] for c in accumulated if len(c.outputs[0].shape) == 2]
            assert matrices
            assert all(Partial() not in value.layout.sbp for value in matrices)


def test_activations_are_summed_in_float32_where_the_user_says() -> None:
    """Outputs of row-split layers, which are bf16 under autocast."""
    found = {}
    for activations in (None, "fp32"):
        strategy = replace(TENSOR, precision=P("bf16", activations=activations))  # type: ignore[arg-type]
        with compiled(gpt(), OPTIMIZERS["adamw"], strategy, (0, 1)) as program:
            found[activations] = {box.output.dtype for box in sums(program.graph, 3)}
            loss = program.step(batches_of(1)[0]).item()
            assert loss == pytest.approx(token_loss(gpt(), batches_of(1)[0]).item(), rel=2e-2)
    assert "bfloat16" in found[None]
    assert found["fp32"] == {"float32"}


def test_what_travelled_in_float32_travels_on() -> None:
    """A conversion to float32 is gone behind a sum in float32; what is read in other layouts is that sum."""
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    x = torch.randn(4, 4, 6)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch).flatten(1)
        loss = nn.functional.binary_cross_entropy_with_logits
        return loss(scores, torch.ones_like(scores), reduction="sum")

    strategy = weft.Strategy(
        parameters={"weight": (S(0), S(1)), "bias": S(0)}, precision=P("bf16", activations="fp32")
    )
    expected = loss_fn(model, x).item()
    with weft.local_world(6):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        place = weft.placement("cpu", [[0, 1], [2, 3], [4, 5]])
        with_sums = weft.compile(model, loss_fn, optimizer, x, placement=place, strategy=strategy)
        assert with_sums.step(x).item() == pytest.approx(expected, rel=2e-2)
        with_sums.close()


def test_steps_without_an_update_add_up() -> None:
    make = OPTIMIZERS["adamw"]
    batches = batches_of(2)
    plain = gpt().bfloat16()
    gradients: State = {}
    for batch in batches:
        plain.zero_grad()
        token_loss(plain, batch).backward()
        for name, p in plain.named_parameters():
            assert p.grad is not None
            gradients[name] = gradients.get(name, torch.zeros(p.shape)) + p.grad.float()
    masters = {name: p.detach().float() for name, p in plain.named_parameters()}
    optimizer = make(list(masters.values()))
    for name, master in masters.items():
        master.grad = gradients[name]
    optimizer.step()
    with compiled(gpt().bfloat16(), make, weft.Strategy(precision=P(masters=True))) as program:
        program.step(batches[0], update=False)
        program.step(batches[1])
        assert apart(program.full_state_dict(masters=True), masters) == 0.0


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_an_overflow_leaves_masters_and_parameters(ranks: Any) -> None:
    """float16 parameters with masters: what GradScaler cannot unscale by itself."""
    factors = (1.0, 1e5, 1.0)

    def scaled(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = token_loss(model, batch).float() * batch["factor"].mean()
        return loss

    batches = [
        {**batch, "factor": torch.full((8,), f)}
        for batch, f in zip(batches_of(), factors, strict=True)
    ]
    make = OPTIMIZERS["adamw"]
    strategy = replace(DATA, precision=P("fp16", masters=True), zero=weft.Zero(1))
    with compiled(gpt().half(), make, strategy, ranks, scaled, batches[0]) as program:
        program.step(batches[0])
        before = program.full_state_dict(masters=True), program.full_state_dict()
        program.step(batches[1])
        assert apart(program.full_state_dict(masters=True), before[0]) == 0.0
        assert apart(program.full_state_dict(), before[1]) == 0.0
        program.step(batches[2])
        after = program.full_state_dict(masters=True)
        assert apart(after, before[0]) > 0.0
        rounded = {name: value.half() for name, value in after.items()}
        assert apart(program.full_state_dict(), rounded) == 0.0


def test_masters_go_on_where_they_were() -> None:
    make, strategy = OPTIMIZERS["momentum"], replace(DATA, precision=P(masters=True))
    with compiled(gpt().bfloat16(), make, strategy, (0, 1)) as program:
        program.step(batches_of(1)[0])
        masters, rounded = program.full_state_dict(masters=True), program.full_state_dict()
        expected = program.step(batches_of(2)[1]).item()
    with compiled(GPT().bfloat16(), make, strategy, (0, 1)) as program:
        program.load_full_state_dict(masters)
        assert apart(program.full_state_dict(masters=True), masters) == 0.0
        assert program.step(batches_of(2)[1]).item() == expected
        # Rounded values become the masters too: the next update starts from them.
        program.load_full_state_dict(rounded)
        assert apart(program.full_state_dict(masters=True), rounded) == 0.0


def test_masters_without_a_narrow_parameter_are_refused() -> None:
    with (
        pytest.raises(CaptureError, match=r"call model.bfloat16\(\) before the optimizer is made"),
        compiled(gpt(), OPTIMIZERS["adamw"], weft.Strategy(precision=P(masters=True))),
    ):
        pass


def test_memory_is_that_of_the_textbook() -> None:
    """2 bytes of weight, 4 + 4 + 4 of master and two moments, all divided by the ranks (ZeRO, section 3.1)."""
    elements = sum(p.numel() for p in gpt().parameters())
    for level, ranks in ((None, 1), (1, 2)):
        zero = level and weft.Zero(level)  # type: ignore[arg-type]
        strategy = replace(DATA, zero=zero, precision=P(masters=True))
        with compiled(gpt().bfloat16(), OPTIMIZERS["adamw"], strategy, range(ranks)) as program:
            (held, *_) = (rank.predicted for rank in program.memory())
            assert held.parameters == pytest.approx(2 * elements / ranks, rel=0.02)
            assert held.states == pytest.approx(12 * elements / ranks, rel=0.02)


def test_a_loss_that_is_scaled_keeps_no_gradients() -> None:
    strategy = weft.Strategy(precision=P(parameters="fp16"))
    with (
        compiled(gpt(), OPTIMIZERS["adamw"], strategy) as program,
        pytest.raises(UserError, match="an overflow would have to skip all"),
    ):
        program.step(batches_of(1)[0], update=False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_products_are_summed_before_they_are_rounded(ranks: int) -> None:
    """A row-split layer whose parts cancel; the loss reads its outputs as bf16."""
    model = nn.Linear(256, 128, bias=False)
    torch.manual_seed(0)
    with torch.no_grad():
        model.weight[:, :128], model.weight[:, 128:] = 300.0, -300.0
    half = torch.rand(8, 128)
    batch = torch.cat((half, half + 1e-3 * torch.rand(8, 128)), 1)

    def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(batch).to(torch.bfloat16)
        return out.float().sum(), out

    strategy = weft.Strategy(batch={"*": B}, parameters={"weight": S(1)})
    with compiled(model, OPTIMIZERS["momentum"], strategy, range(ranks), loss, batch) as program:
        expected = loss(model, batch)[1].detach().float()
        found = program.step(batch)[1].float()
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_two_processes_are_two_threads(tmp_path: Path) -> None:
    script = Path(__file__).with_name("precision_on_processes.py")
    passed(script, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    with weft.local_world(2):
        losses, masters = train(2)
    assert first["losses"] == losses
    found = {name: torch.tensor(value) for name, value in first["masters"].items()}
    assert apart(found, masters) == 0.0


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize(
    "precision", [P(activations="fp32"), P(activations="fp32", accumulate=None)]
)
def test_wide_sums_beside_shards_and_micro_batches(precision: weft.Precision, level: Any) -> None:
    """A bias of split columns is widened for its exchange and for its sum; parts are boxed twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    x, reference = torch.randn(4, 6, 8).bfloat16(), copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = mean_square(reference, x)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    strategy = weft.Strategy(
        batch={"*": (S(0), B)},
        parameters={"1.weight": (B, S(0)), "1.bias": (B, S(0))},
        zero=weft.Zero(level),
        micro_batches=2,
        precision=precision,
    )
    with weft.local_world(4):
        program = weft.compile(
            model,
            mean_square,
            torch.optim.SGD(model.parameters(), lr=0.1),
            x,
            placement=weft.placement("cpu", [[0, 1], [2, 3]]),
            strategy=strategy,
        )
        assert [program.step(x).item() for _ in range(3)] == pytest.approx(expected, rel=3e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_updated_as_by_plain_sgd(dtype: torch.dtype) -> None:
    """torch's fused SGD leaves vectors of 16-bit numbers as they are on CPUs."""
    torch.manual_seed(0)
    model, x = nn.Linear(32, 32).to(dtype), torch.randn(8, 32).to(dtype)
    reference = copy.deepcopy(model)
    mean_square(reference, x).backward()
    torch.optim.SGD(reference.parameters(), lr=1.0, foreach=False).step()
    with weft.local_world(1):
        program = weft.compile(
            model,
            mean_square,
            torch.optim.SGD(model.parameters(), lr=1.0),
            x,
            placement=weft.placement("cpu", [0]),
        )
        program.step(x)
        found = program.full_state_dict()
    for name, parameter in reference.named_parameters():
        assert torch.equal(found[name], parameter), name


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()
