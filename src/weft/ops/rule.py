"""Declarations of rules: one call of `rule` for each op, or for a list of ops that behave alike.

Ops without a rule run whole, which is right for any pure ATen op
whose output shapes do not depend on values. Exceptions (random draws, writes in place, meanings that
depend on strides) are here by name, because rules do not know torch; a test holds the names against its schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias, TypedDict, final

from weft.errors import RuleError, wrong
from weft.layout import Reduction, Split, shard_range
from weft.ops.call import OpCall, Signature, with_arguments
from weft.ops.factors import Factors, bind, parse_factors, whole_factors, without_broadcasts
from weft.ops.weft_ops import WEFT_OPS, ops_that

if TYPE_CHECKING:
    from typing_extensions import Unpack

NAMESPACES = ("aten", "prims")


# Groups of argument positions: the op is linear jointly in each group while all other arguments are
# fixed.
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True)
class Cut:
    """The piece of a call that is being localized: the whole call, its signature, and the rank's place on the axis."""

    whole: OpCall
    signature: Signature
    parts: int
    index: int

    def operand_range(self, operand: int, dim: int) -> tuple[int, int]:
        """(offset, length) of this rank's piece of dimension `dim` of an operand."""
        sbp = self.signature.operands[operand]
        size = self.whole.operands[operand].shape[dim]
        return shard_range(size, self.parts, self.index) if sbp == Split(dim) else (0, size)

    def result_range(self, dim: int) -> tuple[int, int]:
        """(offset, length) of this rank's piece of dimension `dim` of the first result."""
        spec = self.whole.results[0]
        size = spec.shape[dim] if spec else 0
        split = self.signature.results[0] == Split(dim)
        return shard_range(size, self.parts, self.index) if split else (0, size)


Adapt: TypeAlias = Callable[[OpCall, Cut], OpCall]
FindFactors: TypeAlias = Callable[[OpCall], Factors]


@final
@dataclass(frozen=True)
class Rule:
    """The facts that weft knows about an op; see `rule` for the fields."""

    factors: str | FindFactors
    linear: Groups | Callable[[OpCall], Groups] = ()
    lossy: bool = False
    added: tuple[int, ...] = ()
    monotone: Groups | Callable[[OpCall], Groups] = ()
    extrema: tuple[Reduction, ...] = ("max", "min")
    reduction: Reduction = "sum"
    adapt: Adapt | None = None
    ignored: tuple[int, ...] | Callable[[OpCall], tuple[int, ...]] = ()
    anyhow: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    view: bool = False
    shares: bool | None = None
    flops: Callable[[OpCall], int] | None = None
    traffic: Callable[[OpCall], int] | None = None

    def bind(self, call: OpCall) -> Factors:
        """The factors of one call."""
        return _bound(self, call)

    def __hash__(self) -> int:
        # For what tells most rules apart: what is known of calls is looked up by rule and call all the time.
        return hash((self.factors, self.view, self.flops))

    def linear_groups(self, call: OpCall) -> Groups:
        """The groups of positions in which one call is linear."""
        return self.linear(call) if callable(self.linear) else self.linear

    def monotone_groups(self, call: OpCall) -> Groups:
        """The groups of positions through which the largest and the smallest pass."""
        return self.monotone(call) if callable(self.monotone) else self.monotone

    def ignored_positions(self, call: OpCall) -> tuple[int, ...]:
        """The positions of arguments of one call whose values do not matter."""
        return self.ignored(call) if callable(self.ignored) else self.ignored


# Calls of which facts are kept: blocks repeat them, and searches plan nearly the same step again and again.
# Eager steps whose shapes never come again must not fill the memory: a call takes about 10 KB in all.
KNOWN_CALLS = 1 << 14


@lru_cache(maxsize=KNOWN_CALLS)
def _bound(rule: Rule, call: OpCall) -> Factors:
    factors = rule.factors
    bound = bind(factors, call) if isinstance(factors, str) else factors(call)
    return without_broadcasts(call, bound)


_RULES: dict[str, Rule] = {}
# The ones of them that weft comes with.
_SHIPPED: dict[str, Rule] = {}
# The ops whose results may share memory with their first operand.
_SHARING: set[str] = set(ops_that("shares"))
_WHOLE = Rule(whole_factors)  # of ops that need none: see `weft.ops.rule`


@final
class RuleOptions(TypedDict, total=False):
    """The options of `rule`."""

    linear: Groups | Callable[[OpCall], Groups]
    lossy: bool
    added: tuple[int, ...]
    monotone: Groups | Callable[[OpCall], Groups]
    extrema: tuple[Reduction, ...]
    reduction: Reduction
    adapt: Adapt
    ignored: tuple[int, ...] | Callable[[OpCall], tuple[int, ...]]
    anyhow: tuple[int, ...]
    kept: tuple[int, ...]
    readers: tuple[str, ...]
    places: tuple[int, ...]
    view: bool
    shares: bool
    flops: Callable[[OpCall], int]
    traffic: Callable[[OpCall], int]


def rule(
    ops: str | Sequence[str],
    factors: str | FindFactors | None = None,
    **options: Unpack[RuleOptions],
) -> Callable[[FindFactors], FindFactors]:
    """Declare the rule of one op, or of several that behave alike; a later rule replaces an earlier one.

    Args:
        ops: names such as "aten.mm.default".
        factors: factor notation (see `weft.ops.factors`), or a function from a call to its
            `Factors`; without it, `rule(ops, …)` decorates that function.
        **options: further properties of the op:
            linear: groups of argument positions (or a function from a call to them). Partial(sum)
                passes when all operands of a group are Partial and all others Broadcast; a number
                other than 0 in the group forbids it, and so does a result of a dtype that does not
                hold the operands' numbers: summands would be rounded before they are summed.
            lossy: true if Partial(sum) passes in spite of that.
            added: positions of arguments that are added to the rest, as the bias of addmm is: when
                a factor that they lack is contracted, they must be Partial too, or every rank would
                add them.
            monotone: the same as `linear` for the reductions of `extrema`, Partial(max) and
                Partial(min); numbers do not matter.
            reduction: of results that lack a contracted factor.
            adapt: function (call with local shapes, Cut) -> local call, where arguments name sizes
                or positions.
            ignored: positions of arguments (or a function from a call to them) whose values do not
                matter: where they are Broadcast, they may also be Partial(sum).
            anyhow: positions of arguments that are ignored: any layout is allowed.
            kept: numbers of results that only the ops of `readers` understand: they are never boxed.
            readers: the ops that understand them, as the op's backward.
            places: positions of arguments that say where a rank's shard begins, and nothing else.
            view: true if the op moves no data.
            shares: true if the result may be the first operand, or a view of it; by default as `view`.
            flops, traffic: functions of a call, where the defaults of `weft.ops.cost` do not fit.

    Raises:
        RuleError: when the notation is malformed.
    """
    names = (ops,) if isinstance(ops, str) else ops
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise wrong("weft.rule: ops", "names of ops such as aten.mm.default", ops, RuleError)
    unknown = sorted(set(options) - {each.name for each in fields(Rule)})
    if unknown:
        raise RuleError(
            f"weft.rule has no option {unknown[0]}; use those that its documentation names"
        )

    def declare(found: FindFactors) -> FindFactors:
        _declare(names, Rule(found, **options))
        return found

    if isinstance(factors, str):
        parse_factors(factors)
        _declare(names, Rule(factors, **options))
    elif callable(factors):
        declare(factors)
    elif factors is not None:
        expected = 'factors such as "m k+, k n -> m n", or a function'
        raise wrong("weft.rule: factors", expected, factors, RuleError)
    return declare


def _declare(names: Sequence[str], declared: Rule) -> None:
    for name in names:
        _RULES[name] = declared
        if name not in WEFT_OPS:
            shares = declared.view if declared.shares is None else declared.shares
            (_SHARING.add if shares else _SHARING.discard)(name)


def ship_rules() -> None:
    """Note that all rules so far are those that weft comes with."""
    _SHIPPED.update(_RULES)


def declared_rules() -> dict[str, Rule]:
    """The rules that were declared beside those that weft comes with, or in their place, by op."""
    return {op: found for op, found in _RULES.items() if _SHIPPED.get(op) != found}


def shard_places(op: str) -> tuple[int, ...]:
    """The positions of the arguments of an op that say where a rank's shard begins, and nothing else."""
    known = WEFT_OPS.get(op) or _RULES.get(op)
    return known.places if known else ()


def rule_of(call: OpCall) -> Rule:
    """The rule of a call's op; a pure ATen op without a rule runs whole.

    Raises:
        RuleError: when there is none; the message says how to declare one.
    """
    found = _RULES.get(call.op) or (_WHOLE if runs_whole(call.op) else None)
    if found is None:
        operands = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in call.operands)
        raise RuleError(
            f"the op {call.op} ({operands}) has no sharding rule. Declare one in a line, for example "
            f'weft.rule("{call.op}", "m k+, k n -> m n"): one term of factors for each tensor argument and result, '
            "+ marks a contracted factor, ! one that is never split"
        )
    return found


def factors_of(op: str) -> str | FindFactors | None:
    """The factor notation of the op's rule, or the function that finds its factors; None when it has no rule."""
    found = _RULES.get(op)
    return found.factors if found else None


def kept_results(op: str) -> tuple[int, ...]:
    """The numbers of the op's results that only a few other ops understand, as its backward does."""
    found = _RULES.get(op)
    return found.kept if found else ()


def shares_memory(op: str) -> bool:
    """True if a result of the op may be its first operand, or a view of it."""
    return op in _SHARING


def sharing_ops() -> AbstractSet[str]:
    """All ops of which that is so."""
    return _SHARING


def sharing(ops: Sequence[str]) -> None:
    """Declare that results of ops without a rule may be their first operand, or a view of it."""
    _SHARING.update(ops)


def kept_readers(op: str) -> tuple[str, ...]:
    """The ops that understand these results."""
    found = _RULES.get(op)
    return found.readers if found else ()


def has_rule(op: str) -> bool:
    """True if the op has a rule."""
    return op in _RULES


def adapts(op: str) -> bool:
    """True if the arguments of a shard of the op may be others than those of the whole."""
    found = _RULES.get(op)
    return found is not None and found.adapt is not None


def registered_ops() -> tuple[str, ...]:
    """Names of all ops that have a rule, sorted."""
    return tuple(sorted(_RULES))


def aten(names: str) -> tuple[str, ...]:
    """Full names of ATen ops given by words: `aten("mm sum.dim_IntList")`."""
    return tuple(
        f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()
    )


def resized(position: int) -> Adapt:
    """An `adapt` for ops whose argument at `position` is the shape of the result."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        return with_arguments(local, {position: _shape(local)})

    return adapt


def renamed(op: str, position: int) -> Adapt:
    """An `adapt` that runs `op(first argument, shape of the result)` instead."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        return OpCall(op, (local.args[0], _shape(local)), (), local.operands, local.results)

    return adapt


def _shape(call: OpCall) -> tuple[int, ...]:
    return call.results[0].shape if call.results[0] else ()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_RANDOM = _names(
    """
    _cudnn_attention_backward _cudnn_attention_forward _cudnn_init_dropout_state _cudnn_rnn
    _efficient_attention_forward _flash_attention_forward _fused_dropout _fused_sdp_choice _lstm_mps
    _nested_tensor_softmax_with_shape _sample_dirichlet _scaled_dot_product_attention_math
    _scaled_dot_product_attention_math_for_mps _standard_gamma _triton_scaled_dot_attention alpha_dropout
    bernoulli binomial cauchy dropout exponential feature_alpha_dropout feature_dropout geometric gru log_normal
    lstm miopen_rnn multinomial native_dropout normal normal_functional poisson rand rand_like randint
    randint_like randn randn_like random randperm rnn_relu rnn_tanh rrelu rrelu_with_noise
    rrelu_with_noise_functional scaled_dot_product_attention uniform inductor_random
    """
)
_DATA_DEPENDENT = _names(
    """
    _local_scalar_dense _unique _unique2 allclose argwhere bincount equal index is_nonzero item linalg_lstsq
    masked_select nonzero one_hot repeat_interleave unique_consecutive unique_dim unique_dim_consecutive
    """
)
_STRIDED = _names(
    """
    as_strided as_strided_copy as_strided_scatter _reshape_alias resize resize_as set
    """
)
_WRITING = _names(
    """
    __iand__ __ilshift__ __ior__ __irshift__ __ixor__ _batch_norm_with_update _cummax_helper _cummin_helper
    _flash_attention_forward_no_dropout_inplace _fused_moving_avg_obs_fq_helper _native_batch_norm_legit
    fused_moving_avg_obs_fake_quant record_stream retain_grad set_data copy_to
    """
)
_OUT_OVERLOADS = _names(
    """
    a eigenvalues eigvals grad_input inverse dim_max dim_min dim_values output result sign values values_stable
    L OutScalar_Other OutScalar_Self OutTensor Q U X
    """
)
_UNSAFE = _RANDOM | _DATA_DEPENDENT | _STRIDED | _WRITING


def runs_whole(op: str) -> bool:
    """True if `op`, such as "aten.linalg_qr.default", may run whole without a rule that says so."""
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    writes = name.endswith("_") and not name.endswith("__")
    writes = writes or "out" in overload.split("_") or overload in _OUT_OVERLOADS
    fused = name.startswith("_scaled_dot_product_")  # draws inside when it drops out
    return namespace in NAMESPACES and name not in _UNSAFE and not writes and not fused
