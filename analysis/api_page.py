"""The reference page of the public Python API, in Markdown: signatures and docstrings of all public names.

It is made from the source alone, so that neither torch nor `gsreal` is imported:

    python -m analysis.api_page > gssim/API.md
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gssim", "gsreal.gradient_sharding")
Definition = ast.FunctionDef | ast.ClassDef


def api_page(root: Path = ROOT) -> str:
    """Return the page: a section for each package, and in it one for each name of its `__all__`."""
    parts = ["# The Python API", "Made by `python -m analysis.api_page > gssim/API.md` from the docstrings."]
    for package in PACKAGES:
        tree = _parsed(root, package)
        assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        names: list[str] = ast.literal_eval(assigned["__all__"])
        parts += [f"## `{package}`", _described(tree)]
        for name in names:
            parts += _section(name, definition_of(root, package, name))
    return "\n\n".join(part for part in parts if part) + "\n"


def definition_of(root: Path, module: str, name: str) -> Definition:
    """Return the definition of a name that a module defines or imports; raise LookupError where there is none."""
    tree = _parsed(root, module)
    for node in ast.walk(tree):
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            imported = {alias.asname or alias.name: alias.name for alias in node.names}
            if name in imported:
                return definition_of(root, node.module, imported[name])
    raise LookupError(f"{module} neither defines nor imports {name}")


def _parsed(root: Path, module: str) -> ast.Module:
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _section(name: str, node: Definition) -> Iterator[str]:
    """Yield the paragraphs on a function or a class with its fields, properties and methods."""
    if isinstance(node, ast.FunctionDef):
        yield f"### `{name}`"
        yield from (_signature(node), _described(node))
        return
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"### `{name}`" + (f" ({bases})" if bases else "")
    yield _described(node)
    if fields := list(_fields(node)):
        yield "\n".join(fields)
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and ast.get_docstring(member):
            decorators = {ast.unparse(decorator) for decorator in member.decorator_list}
            if decorators & {"property", "cached_property"}:
                yield f"#### `{name}.{member.name}`"
            else:
                yield f"#### `{name}.{member.name}`\n\n{_signature(member)}"
            yield _described(member)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield a line for each public field of a class, with the docstring below it."""
    for number, field in enumerate(node.body):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith("_"):
            continue
        default = f" = {ast.unparse(field.value)}" if field.value is not None else ""
        after = node.body[number + 1] if number + 1 < len(node.body) else None
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = ": " + " ".join(after.value.value.split())
        kind = field.annotation
        if (
            isinstance(kind, ast.Subscript)
            and ast.unparse(kind.value) == "Annotated"
            and isinstance(kind.slice, ast.Tuple)
        ):
            kind = kind.slice.elts[0]  # validators are no part of the type
        yield f"- `{ast.unparse(field.target)}: {ast.unparse(kind)}{default}`{text}"


def _signature(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if node.args.args and node.args.args[0].arg == "self":
        del node.args.args[0]
    whole = f"{node.name}({ast.unparse(node.args)}){returns}"
    if len(whole) > 110:
        star = f"*{node.args.vararg.arg}" if node.args.vararg else "*"
        plain = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(plain) - len(node.args.defaults)) + list(node.args.defaults)
        lines = [_argument(*pair) for pair in zip(plain, defaults, strict=True)]
        if node.args.kwonlyargs:
            lines.append(star)
            lines += [_argument(*pair) for pair in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        whole = f"{node.name}(\n" + "".join(f"    {line},\n" for line in lines) + f"){returns}"
    return f"```python\n{whole}\n```"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default is not None else "")


def _described(node: Definition | ast.Module) -> str:
    """Return a docstring as Markdown: lists of arguments and errors as bullets."""
    lines, is_list = [], False
    for line in inspect.cleandoc(ast.get_docstring(node) or "").splitlines():
        if re.fullmatch(r"(Args|Raises|Returns|Attributes):", line):
            is_list = True
            lines += [f"**{line.removesuffix(':')}**", ""]
        elif is_list and (entry := re.fullmatch(r" {4}([\w*][\w*, ]*): (.*)", line)):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif is_list and line.startswith("        "):
            lines.append("  " + line.strip())
        else:
            is_list = is_list and not line.strip()
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(api_page())
