"""The free static look at a candidate: does it parse, does it name `ModelNew`, how large is it, what does it use?

Invariants: it runs nothing; it rejects only what could never run (no syntax, no `ModelNew`, too long); hints are advice
and decide nothing, since renaming or reformatting a candidate must not change its verdict.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable

from evaluator.judgement.facts import ScreenFacts
from tasks.records import Candidate, Task

MAX_SOURCE_BYTES = 256 * 1024
MODEL = "Model"
CANDIDATE = "ModelNew"
_HINTS = {
    "load_inline": "cpp_extension", "triton": "triton", "ctypes": "ctypes", "cffi": "ctypes",
    "cupy": "cupy", "compile": "compile", "script": "jit", "trace": "jit", "CUDAGraph": "graph", "Stream": "stream",
    "Thread": "threads", "ThreadPoolExecutor": "threads", "subprocess": "processes", "half": "half", "bfloat16": "half",
    "float16": "half", "autocast": "half", "allow_tf32": "flags", "benchmark": "flags",
}  # fmt: skip


def screen(candidate: Candidate, task: Task) -> ScreenFacts:
    """What the text of a candidate shows."""
    source = candidate.source
    size = len(source.encode(errors="surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        return ScreenFacts(too_long=True, source_bytes=size)
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        return ScreenFacts(syntax_error=f"line {error.lineno}: {error.msg}", source_bytes=size)
    except (ValueError, RecursionError, MemoryError) as error:
        return ScreenFacts(syntax_error=str(error) or "nested too deeply", source_bytes=size)
    return ScreenFacts(
        source_bytes=size,
        names_model=CANDIDATE in source,
        same_formula=same_formula(tree, task.source),
        hints=tuple(sorted({_HINTS[word] for word in _words(tree) if word in _HINTS})),
    )


def _words(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from node.module.split(".")


def same_formula(candidate: ast.Module, reference_source: str) -> bool:
    """Whether `ModelNew` is the reference's class under other names, in another layout."""
    try:
        reference = ast.parse(reference_source)
        own, given = _canonical(candidate, CANDIDATE), _canonical(reference, MODEL)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return own is not None and own == given


def _canonical(tree: ast.Module, name: str) -> str | None:
    """A class's body with locals, arguments and own attributes numbered by first use; None without such a class."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    chosen = classes.get(name)
    if chosen is not None and not _statements(chosen):
        inherited = [base.id for base in chosen.bases if isinstance(base, ast.Name) and base.id in classes]
        chosen = classes[inherited[0]] if inherited else chosen
    if chosen is None or not _statements(chosen):
        return None
    renamer = _Renamer(_imports(tree), set(classes))
    methods = sorted(_statements(chosen), key=lambda node: getattr(node, "name", ""))
    return "\n".join(ast.dump(renamer.visit(ast.parse(ast.unparse(method)))) for method in methods)


def _statements(node: ast.ClassDef | ast.FunctionDef) -> list[ast.stmt]:
    """The body without doc string and `pass`."""
    return [
        statement
        for statement in node.body
        if not isinstance(statement, ast.Pass)
        and not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
    ]


def _imports(tree: ast.Module) -> dict[str, str]:
    """Local names of imported things, with their full dotted names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(
                {alias.asname or alias.name.split(".")[0]: alias.asname and alias.name for alias in node.names}
            )
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: dotted or name for name, dotted in found.items()}


class _Renamer(ast.NodeTransformer):
    """Numbers what the author named; keeps built-ins, spells imported names out, drops annotations and doc strings."""

    def __init__(self, imports: dict[str, str], classes: set[str]) -> None:
        self._imports = imports
        self._classes = classes
        self._numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self._numbers.setdefault(name, f"v{len(self._numbers)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._imports:
            return ast.copy_location(ast.Name(self._imports[node.id], node.ctx), node)
        if node.id in self._classes:
            return ast.copy_location(ast.Name("Class", node.ctx), node)
        if hasattr(builtins, node.id):
            return node
        return ast.copy_location(ast.Name(self._number(node.id), node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr != "training"
        base = self.visit(node.value)
        if (isinstance(base, ast.Name) and "." in base.id) or (isinstance(base, ast.Name) and base.id in self._imports):
            return ast.copy_location(ast.Name(f"{base.id}.{node.attr}", node.ctx), node)
        attribute = self._number(f"self.{node.attr}") if own else node.attr
        return ast.copy_location(ast.Attribute(base, attribute, node.ctx), node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._number(node.arg))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = self.visit(node.args)
        body = [self.visit(statement) for statement in _statements(node)]
        return ast.FunctionDef(node.name, arguments, body, [], None, None)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return self.visit(ast.Assign([node.target], node.value))
