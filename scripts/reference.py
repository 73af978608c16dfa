"""Writes docs/reference.md: the public names of `fleet_sparse` and `fleet_sparse.nn`, from their docstrings.

Nothing is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference.md"

HEAD = """<!-- Written by `scripts/docs` from the docstrings. -->

# Reference

The names of `fleet_sparse`, then those of [`fleet_sparse.nn`](#fleet_sparsenn), for [dygraph](dygraph.md). Those of
`paddle.distributed.fleet`, as `fleet.init_worker`, keep Paddle's meaning; where they differ,
[Running a job](running.md) says so. Settings are environment variables, listed [there](running.md#settings), and every
error is on the page of [errors](errors.md).
"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(reference(), encoding="utf-8")


def reference() -> str:
    """Returns the page as Markdown."""
    package = griffe.load("fleet_sparse", search_paths=[ROOT], resolve_aliases=True)
    layers = package["nn"]
    objects, of_layers = _exported(package), _exported(layers)
    lines = [HEAD, *(_link(each, each.name) for each in objects)]
    lines += [_link(each, f"nn.{each.name}") for each in of_layers]
    lines += ["", *(line for each in objects for line in _entry(each, "##"))]
    lines += ["## fleet_sparse.nn", "", layers.docstring.value, ""]
    return "\n".join([*lines, *(line for each in of_layers for line in _entry(each, "###"))])


def _exported(module: Any) -> list[Any]:
    """The objects of `__all__`: functions, then classes."""
    names = [str(name).strip("'\"") for name in module.exports or ()]
    return [_target(module[name]) for name in sorted(names, key=lambda name: (name[0].isupper(), name.lower()))]


def _link(to: Any, name: str) -> str:
    return f"- [`{name}`](#{to.name.lower()}): {_first_sentence(to)}"


def _target(found: Any) -> Any:
    return found.final_target if found.is_alias else found


def _first_sentence(of: Any) -> str:
    return " ".join(of.docstring.value.split("\n\n")[0].split()) if of.docstring else ""


def _entry(of: Any, level: str) -> list[str]:
    """A heading, the signature, the docstring; of a class also its documented public members."""
    lines = [f"{level} {of.name}", "", "```python", _signature(of), "```", "", *_docstring(of)]
    if of.is_class:
        for member in of.members.values():
            if member.name.startswith("_") or member.is_alias or not member.docstring:
                continue
            if member.is_attribute:
                text = " ".join(member.docstring.value.split())
                lines += [f"- `{member.name}`: `{member.annotation}`{_default(member)}. {text}"]
            else:
                lines += ["", *_entry(member, f"{level}#")]
        lines.append("")
    return lines


def _signature(of: Any) -> str:
    if of.is_function:
        return str(of.signature())
    bases = ", ".join(str(base) for base in of.bases)
    head = f"class {of.name}({bases})" if bases else f"class {of.name}"
    return "\n".join([head, *_constructor(of)])


def _constructor(of: Any) -> list[str]:
    """The signature of `__init__`, or the fields of a struct, which has none; not of errors, which no user makes."""
    if any(str(base).endswith(("Error", "Exception")) for base in of.bases) or "dataclass" in of.labels:
        return []
    if (init := of.members.get("__init__")) is not None:
        return [str(init.signature()).replace("__init__", of.name, 1).removesuffix(" -> None")]
    fields = [each for each in of.members.values() if each.is_attribute and each.annotation and not each.docstring]
    return [f"    {each.name}: {each.annotation} = {each.value}" for each in fields]


def _default(member: Any) -> str:
    return f" = `{member.value}`" if member.value is not None and "property" not in member.labels else ""


def _docstring(of: Any) -> list[str]:
    lines: list[str] = []
    if of.docstring is None:
        return lines
    for section in of.docstring.parse("google", returns_multiple_items=False):
        if section.kind is griffe.DocstringSectionKind.text:
            lines += [section.value, ""]
            continue
        lines += [f"**{section.kind.value.capitalize()}**", ""]
        for item in section.value:
            name = getattr(item, "name", "") or str(item.annotation or "")
            text = " ".join(str(item.description).split())
            lines.append(f"- `{name}`: {text}" if name and not _is_returned(section) else f"- {text}")
        lines.append("")
    return lines


def _is_returned(section: Any) -> bool:
    return section.kind in (griffe.DocstringSectionKind.returns, griffe.DocstringSectionKind.yields)


if __name__ == "__main__":
    main()
