"""The structure of the batch and of the result of the loss function, and the check of later batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from weft.cached import cached_property
from weft.capture.python.symbolic import is_symbolic, number_now
from weft.capture.python.unbacked import is_unbacked, tensor_of
from weft.capture.tree import Static, Tree, flatten, unflatten
from weft.errors import BatchError, CaptureError
from weft.ops.cost import dtype_name


@final
@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of the batch: its key, whole shape and dtype ("int64")."""

    key: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"a tensor {self.dtype}{list(self.shape)}"


@final
@dataclass(frozen=True)
class BatchSpec:
    """Containers and entries of the batch that a step was captured for.

    Attributes:
        leaves: of the batch; those without a tensor have their value at capture.
        constants: the current values of leaves without a tensor, by key (`note_constants`); shared by all shapes of a
            step.
    """

    tree: Tree
    leaves: tuple[TensorLeaf | Static, ...]
    constants: dict[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def _template(self) -> Any:
        """The containers with the number of each leaf in its place."""
        return unflatten(list(range(len(self.leaves))), self.tree)

    @cached_property
    def _tests(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...] | None:
        """Key, shape and dtype of every leaf; None when some are constants."""
        if len(self.tensors) < len(self.leaves):
            return None
        return tuple((leaf.key, leaf.shape, getattr(torch, leaf.dtype)) for leaf in self.tensors)

    def read_batch(self, batch: Any) -> dict[str, torch.Tensor] | None:
        """Give the result of `flatten_batch`, at a tenth of the cost, for plain tensors in dicts, lists and tuples.

        None for any other batch, and for one that differs from the example.
        """
        found: list[Any] = []
        if self._tests is None or not _collect(self._template, batch, found):
            return None
        leaves = {}
        for (key, shape, dtype), leaf in zip(self._tests, found, strict=True):
            if type(leaf) is not torch.Tensor or leaf.dtype is not dtype or not is_dense(leaf):
                return None
            if leaf.shape != shape or leaf.is_meta:
                return None
            leaves[key] = leaf
        return leaves

    def note_constants(self, batch: Any) -> None:
        """Note the leaves of a later batch that are not tensors; nothing if it is built differently."""
        found, tree = self._flattened(batch)
        if self._is_built_alike(found, tree):
            self.constants.update(_constants(found))

    @property
    def tensors(self) -> tuple[TensorLeaf, ...]:
        """The tensors of the batch, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorLeaf))

    @property
    def rows(self) -> int:
        """Rows of the whole batch: the first dimension of its first tensor."""
        return next((leaf.shape[0] if leaf.shape else 1 for leaf in self.tensors), 0)

    def flatten_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        """The tensors of a later batch by key.

        Raises:
            BatchError: naming the first leaf whose place, shape or dtype differs.
        """
        found, tree = self._flattened(batch)
        self._check_structure([key for key, _ in found], tree)
        for expected, (_, leaf) in zip(self.leaves, found, strict=True):
            _check_leaf(expected, leaf)
        return {key: leaf for key, leaf in found if isinstance(leaf, torch.Tensor)}

    def differs_in_shape(self, batch: Any) -> bool:
        """True if a later batch differs in nothing but shapes, if at all, with as many dimensions."""
        found, tree = self._flattened(batch)
        return self._is_built_alike(found, tree) and all(
            map(_alike, self.leaves, [leaf for _, leaf in found])
        )

    def _flattened(self, batch: Any) -> tuple[list[tuple[str, Any]], Tree]:
        return leaves_of(in_order_of_template(unflatten([*self.leaves], self.tree), batch))

    def _is_built_alike(self, leaves: Sequence[tuple[str, Any]], tree: Tree) -> bool:
        return self._keys == [key for key, _ in leaves] and tree == self.tree

    @property
    def _keys(self) -> list[str]:
        return [leaf.key for leaf in self.leaves]

    def _check_structure(self, keys: list[str], tree: Tree) -> None:
        expected = self._keys
        missing, more = set(expected) - set(keys), set(keys) - set(expected)
        if missing or more:
            raise BatchError(
                f"the batch has the leaves {keys}, but the program was compiled for {expected}"
                + (f", {sorted(missing)} are missing" if missing else "")
                + (f", {sorted(more)} are new" if more else "")
                + "; pass a batch built like the example batch, or compile again"
            )
        if keys != expected or tree != self.tree:
            raise BatchError(
                "the containers of the batch differ from those that the program was compiled for; pass a batch "
                f"built like the example batch, or compile again: got {_containers(tree, len(keys))}, expected "
                f"{_containers(self.tree, len(expected))}"
            )


def describe_batch(batch: Any, constants: dict[str, Any] | None = None) -> BatchSpec:
    """Describe the structure of `batch`, and the shapes and dtypes of its leaves.

    Args:
        constants: gets the values of leaves without a tensor, for all shapes of a step; None for a new dict.

    Raises:
        BatchError: when a leaf is neither a dense tensor nor a plain constant, or two leaves have
            the same key.
    """
    found, tree = leaves_of(batch)
    leaves = tuple(_describe(key, leaf) for key, leaf in found)
    keys = [leaf.key for leaf in leaves]
    for key in keys:
        if keys.count(key) > 1:
            raise BatchError(f"two leaves of the example batch are called {key!r}; rename one")
    constants = {} if constants is None else constants
    constants.update(_constants(found))
    return BatchSpec(tree, leaves, constants)


def leaves_of(tree: Any, root: str = "batch") -> tuple[list[tuple[str, Any]], Tree]:
    """Like `flatten`, but a list, tuple or dict of nothing but constants is one leaf."""
    return flatten(tree, root, _is_container)


@final
class NotLoaded:
    """Stands in a list of the batch for what is of a row that this process has not loaded."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # for who copies it
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise BatchError(
            "the step reads or returns a list of the batch that has an entry for each row, and this process has only "
            "some rows; pass what it reads as a tensor, or let each process have the whole batch (for a weft.Loader: "
            "split=False)"
        )

    __repr__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def spread(leaf: Any, rows: int, size: int) -> Any:
    """A leaf of some rows of a batch as one of the whole batch: lists of as many entries with stand-ins in them."""
    if isinstance(leaf, dict):
        return {name: spread(part, rows, size) for name, part in leaf.items()}
    fits = isinstance(leaf, list | tuple) and len(leaf) == rows != size
    return type(leaf)([NotLoaded()] * size) if fits else leaf


def _constants(leaves: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    return ((key, leaf) for key, leaf in leaves if is_constant(leaf))


def is_constant(leaf: Any) -> bool:
    """True for what a step may be given or return beside tensors: numbers, texts, None, and containers of them."""
    plain = (bool, int, float, complex, str, bytes, torch.dtype, NotLoaded)
    # By the type itself: what stands for a number that changes says that it is one.
    return leaf is None or issubclass(type(leaf), plain) or _is_container(leaf)


def _is_container(part: Any) -> bool:
    if type(part) not in (list, tuple, dict):
        return False
    return all(map(is_constant, part.values() if type(part) is dict else part))


def _describe(key: str, leaf: Any) -> TensorLeaf | Static:
    if isinstance(leaf, torch.Tensor):
        _check_dense(key, leaf)
        return TensorLeaf(key, tuple(leaf.shape), dtype_name(leaf.dtype))
    if is_constant(leaf):
        return Static(key, leaf)
    array = hasattr(leaf, "__array__")
    raise BatchError(
        f"the leaf {key!r} of the example batch is of type {type(leaf).__name__}; expected a torch.Tensor or a plain "
        "constant (bool, int, float, str, None): "
        + ("convert it with torch.as_tensor" if array else "pass a dict of its tensors instead")
    )


def is_dense(leaf: torch.Tensor) -> bool:
    """True if a tensor is a block of numbers: not sparse, nested or quantized."""
    return leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized


def _check_dense(key: str, leaf: torch.Tensor) -> None:
    if is_dense(leaf):
        return
    if leaf.is_nested:
        kind, remedy = "nested", "a padded one with a mask: torch.nested.to_padded_tensor(x, 0.0)"
    elif leaf.is_quantized:
        kind, remedy = "quantized", "x.dequantize()"
    else:
        kind, remedy = (
            f"sparse ({leaf.layout})",
            "x.to_dense(), or its indices and values as tensors",
        )
    raise BatchError(
        f"the leaf {key!r} of the batch is a {kind} tensor, and these are not supported; expected a dense one: {remedy}"
    )


def _check_leaf(expected: TensorLeaf | Static, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        _check_dense(expected.key, leaf)
        same = TensorLeaf(expected.key, tuple(leaf.shape), dtype_name(leaf.dtype)) == expected
    else:  # another value is seen by the guards
        same = isinstance(expected, Static) and is_constant(leaf)
    if not same:
        raise BatchError(
            f"leaf {expected.key!r} of the batch: the program was compiled for {expected}, got {_shown(leaf)}; "
            "pass the same kind of batch as the example, or compile again for this one"
        )


def in_order_of_template(template: Any, batch: Any) -> Any:
    """The batch with the entries of its dicts in the template's order, and lists for its tuples or the other way."""
    kinds = {type(template), type(batch)}
    if kinds == {dict} and template.keys() == batch.keys():
        return {key: in_order_of_template(template[key], batch[key]) for key in template}
    if kinds <= {list, tuple} and len(template) == len(batch):
        return type(template)(map(in_order_of_template, template, batch))
    return batch


def _alike(expected: TensorLeaf | Static, leaf: Any) -> bool:
    if isinstance(expected, Static) or not isinstance(leaf, torch.Tensor):
        try:
            _check_leaf(expected, leaf)
        except BatchError:
            return False
        return True
    return dtype_name(leaf.dtype) == expected.dtype and leaf.dim() == len(expected.shape)


def _shown(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return str(TensorLeaf("", tuple(leaf.shape), dtype_name(leaf.dtype)))
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        return f"a {kind} {leaf.dtype}{list(leaf.shape)}, which torch.as_tensor makes a tensor"
    return f"{repr(leaf)[:80]} of type {type(leaf).__name__}"


@final
class _Leaf:
    def __repr__(self) -> str:
        return "…"


def _containers(tree: Tree, leaves: int) -> str:
    """The containers of a batch, as Python shows them: `({'x': …}, […])`."""
    return repr(unflatten([_Leaf()] * leaves, tree))[:200]


def _collect(template: Any, batch: Any, found: list[Any]) -> bool:
    """Append the leaves of `batch` to `found`; False if it has not the template's containers, of plain types."""
    kind = type(template)
    if kind is int:
        found.append(batch)
        return True
    kinds = {kind, type(batch)}
    if not (kinds == {dict} or kinds <= {list, tuple}) or len(template) != len(batch):
        return False
    if kind is dict:
        if list(template) != list(batch):
            return False
        template, batch = template.values(), batch.values()
    return all(_collect(part, own, found) for part, own in zip(template, batch, strict=True))


_RETURN_HELP = "return the loss, a tuple or list whose first entry is the loss, or a dict with the entry 'loss'"


@final
@dataclass(frozen=True, slots=True)
class Number:
    """A leaf that is a number of Python, read from the tensor with this key."""

    key: str


@final
@dataclass(frozen=True)
class OutputSpec:
    """Containers and leaves of the returned value; a leaf is the key of a tensor, or a constant handed back as is."""

    tree: Tree
    leaves: tuple[str | Number | Static, ...]

    def check_loaded(self) -> None:
        """Raise BatchError where an entry of the batch is returned of which this process has not all rows."""
        for leaf in self.leaves:
            if isinstance(leaf, Static) and is_symbolic(leaf.value):
                repr(number_now(leaf.value))

    def unflatten(self, values: Mapping[str, Any]) -> Any:
        """Build what the loss function returned from the tensors by key."""
        return unflatten([_given(leaf, values) for leaf in self.leaves], self.tree)


def _given(leaf: str | Number | Static, values: Mapping[str, Any]) -> Any:
    match leaf:
        case Static():
            return number_now(leaf.value)
        case Number(key=key):
            return values[key].item()
    return values[leaf]


def describe_outputs(
    result: Any, loss: torch.Tensor | None
) -> tuple[OutputSpec, dict[str, torch.Tensor]]:
    """The structure of `result`, and its tensors by key; the key of `loss` is "loss".

    An object that is neither tensor nor constant, such as the cache in what a model of
    `transformers` returns, is handed back as None.

    Raises:
        CaptureError: when all that is returned is such an object.
    """
    found, tree = leaves_of(result, "output")
    tensors: dict[str, torch.Tensor] = {}
    leaves: list[str | Number | Static] = []
    for path, leaf in found:
        if is_unbacked(leaf):
            tensors[path] = tensor_of(leaf)
            leaves.append(Number(path))
        elif isinstance(leaf, torch.Tensor):
            key = "loss" if leaf is loss else path
            tensors[key] = leaf
            leaves.append(key)
        else:
            leaves.append(Static(path, _plain(path, leaf)))
    return OutputSpec(tree, tuple(leaves)), tensors


def find_loss(result: Any) -> torch.Tensor:
    """The loss in what the loss function returned: a float tensor of one element that requires grad.

    Raises:
        CaptureError: when there is none.
    """
    loss = None if is_unbacked(result) else getattr(result, "loss", result)
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif isinstance(result, tuple | list):
        loss = result[0] if result else None
    if is_unbacked(result) or is_unbacked(loss):
        raise CaptureError(
            "the loss is a number, as .item() or float() returns, through which no gradient flows; return the tensor "
            "too"
        )
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"the loss function returned {_kind(result)} and no loss was found in it; {_RETURN_HELP}"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss has the shape {list(loss.shape)}; expected a single number: reduce it with .mean() or .sum()"
        )
    if not loss.is_floating_point():
        raise CaptureError(f"the loss is {loss.dtype}; expected a floating-point number")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not require grad: no trainable parameter leads to it (detached, under torch.no_grad, "
            "or all parameters are frozen); leave such a parameter trainable, or compile with optimizer=None"
        )
    return loss


def _plain(path: str, leaf: Any) -> Any:
    if is_symbolic(leaf) or is_constant(leaf):
        return leaf
    if path != "output":
        return None  # beside others, as a cache in what a model returns
    raise CaptureError(f"the loss function returned {_kind(leaf)}; {_RETURN_HELP}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"
