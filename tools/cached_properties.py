"""An extension of Griffe, which reads docstrings for the site: weft's cached properties are read as attributes."""

from __future__ import annotations

from typing import Any, final

import griffe

DECORATOR = "weft.cached.cached_property"


@final
class CachedProperties(griffe.Extension):
    """Takes methods with the decorator for properties, as it takes those of `functools.cached_property`."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Put an attribute in the place of such a method."""
        owner = func.parent
        if owner is None or all(each.callable_path != DECORATOR for each in func.decorators):
            return
        attribute = griffe.Attribute(
            func.name,
            lineno=func.lineno,
            endlineno=func.endlineno,
            docstring=func.docstring,
            annotation=func.returns,
        )
        attribute.labels |= {"cached", "property"}
        owner.set_member(func.name, attribute)
