"""Families of `transformers` to compare, tiny, as they are."""

from __future__ import annotations

from examples.models import huggingface
from tools.model_cases import Case

CASES: dict[str, Case] = {
    name: Case(family.build, huggingface.loss, family.batch, family.layouts)
    for name, family in huggingface.FAMILIES.items()
}
