"""Hooks of MkDocs (mkdocs.yml): the pages in docs/ become a site as they are, with all links that a code host follows.

- README, CONTRIBUTING and CHANGELOG of the root are pages of the site too.
- Links that lead out of docs/ go to these pages, or to copies of the files that they name.
- `::: weft.name` on a page of the reference stands for the docstring of a public name, wherever it is defined.
- A page that would load something from another host is a warning, and warnings are errors.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Files of the root that are pages, with their names on the site.
ROOT_PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# The folder of the site for copies of other files of the tree.
COPIES = "tree"

_DOCS = "docs/"
_FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)([^)\s]*\))")
_PUBLIC = re.compile(r"^::: weft\.(\w+)$", re.MULTILINE)
_LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")

log = logging.getLogger("mkdocs.hooks.site_pages")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages of the root."""
    root = _root(config)
    for name, page in ROOT_PAGES.items():
        if (root / name).is_file():
            files.append(File.generated(config, page, content=(root / name).read_text()))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """The text of a page with the links of the site, and the places of public names."""
    root, here = _root(config), page.file.src_uri

    def led(match: re.Match[str]) -> str:
        target = site_target(match[2], here, root)
        if target is None:
            return match[0]
        if target.startswith(f"{COPIES}/") and files.get_file_from_path(target) is None:
            path = root / target.removeprefix(f"{COPIES}/")
            files.append(File.generated(config, target, abs_src_path=str(path)))
        return match[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + match[3]

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(led, part) for part in parts[::2]]
    return _PUBLIC.sub(lambda match: _docstring(match[1], root), "".join(parts))


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Warn of what a page loads from elsewhere."""
    for tag in _LOADED.findall(output):
        log.warning(
            "%s loads %s: keep a copy below docs/, so that the page works without a network",
            *(page.file.src_uri, tag),
        )
    return output


def site_target(link: str, here: str, root: Path) -> str | None:
    """The page or copy on the site that a link of the tree leads to; None where the link can stay as it is.

    Args:
        link: without what follows `#`.
        here: the page with the link, by its name on the site.
        root: of the tree.
    """
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    of_root = {page: name for name, page in ROOT_PAGES.items()}
    source = of_root.get(here, _DOCS + here)
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if target.startswith(_DOCS):
        return target.removeprefix(_DOCS) if here in of_root else None
    if target in ROOT_PAGES:
        return ROOT_PAGES[target]
    return f"{COPIES}/{target}" if (root / target).is_file() else None


@cache
def definition(module: str, name: str, source: Path) -> str:
    """The dotted path of what a module calls `name`, by following the imports; nothing is imported.

    Args:
        module: such as "weft".
        name: such as "compile".
        source: the folder of the top package.

    Raises:
        KeyError: the module has no such name.
    """
    path = source.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    if name in {found for node in tree.body for found in _defined(node)}:
        return f"{module}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if (node.module, alias.name) == (module, name):  # a module of its own
                        return f"{module}.{name}"
                    return definition(node.module, alias.name, source)
    raise KeyError(f"{module} has no {name}")


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _docstring(name: str, root: Path) -> str:
    """The block for a public name, under the name by which users call it."""
    try:
        place = definition("weft", name, root / "src")
    except KeyError:
        log.warning("weft has no public name %s; take one of weft.__all__", name)
        return ""
    return f"::: {place}\n    options:\n      heading: weft.{name}\n      toc_label: weft.{name}"


def _root(config: MkDocsConfig) -> Path:
    """The root of the tree."""
    return Path(config.config_file_path).parent
