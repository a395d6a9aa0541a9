"""Changes of files that tests should notice: mutants of Python, by its syntax tree, and of C++."""
import ast
import re
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).parents[1]
OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in",
            "not in": "in", "is": "is not", "is not": "is", "and": "or", "or": "and"}
OPERATORS = re.compile("|".join(sorted(OPPOSITE, key=len, reverse=True)).encode())
CPP = [  # a line's pattern, and what replaces it
    ("rounding", r"\b(std::)?(nearbyint|rint)f?\(", "std::trunc("),
    ("rounding", r"0x7fff\b", "0x8000"),
    ("bound", r"(for \(.*; \w+) < ([^;]+);", r"\1 + 1 < \2;"),
    ("tail", r"\+ (\w+) <= (\w+)", r"+ \1 - 1 <= \2"),
    ("tail", r"% (\w+)", r"% (\1 - 1)"),
    ("comparison", r" (?<!<)< (?!<)", " <= "), ("comparison", " == ", " != "),
    ("comparison", " && ", " || "),
    ("deleted statement", r"^(\s+)(?!return|break|continue|auto|const|using)[\w.\[\]>()-]+"
                          r"( [+*|-]?= .*|\(.*\));$", r"\1;")]


class Mutant(NamedTuple):
    """A change of a file: bytes that a text replaces, on the lines of `place`."""
    path: str
    place: range
    start: int
    end: int
    text: str
    kind: str
    function: Optional[tuple]  # name and first line of the outermost one, if its body changes

    def __str__(self):
        source = Path(ROOT, self.path).read_bytes()
        of = " ".join(source[self.start:self.end].decode().split())
        return f"{self.path}:{self.place[0]}: {self.kind}: {of[:60]} -> {self.text[:60]}"

    def source(self):
        source = Path(ROOT, self.path).read_bytes()
        return source[:self.start] + self.text.encode() + source[self.end:]


class PythonFile:
    """Finds the mutants of a Python file."""

    def __init__(self, path):
        self.path, self.source = path, Path(ROOT, path).read_bytes()
        self.tree = ast.parse(self.source)
        self._starts = [0]  # of lines
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node):
        return (self._starts[node.lineno - 1] + node.col_offset,
                self._starts[node.end_lineno - 1] + node.end_col_offset)

    def mutants(self):
        return [mutant for node in self.tree.body for mutant in self._walk(node, None)]

    def bodies(self):
        """A mutant of each function that has more than a docstring: without its body."""
        found = []
        for outer in ast.walk(self.tree):
            for node in outer.body if isinstance(outer, (ast.Module, ast.ClassDef)) else []:
                if not isinstance(node, ast.FunctionDef):
                    continue
                body = node.body[ast.get_docstring(node) is not None:]
                if body and not isinstance(body[0], (ast.Pass, ast.Raise)):
                    start, end = self.span(body[0])[0], self.span(body[-1])[1]
                    # keeps the cell of super()
                    text = "__class__" if b"super()" in self.source[start:end] else "pass"
                    found.append(Mutant(self.path, range(body[0].lineno, body[-1].end_lineno + 1),
                                        start, end, text, f"body of {node.name}", first(node)))
        return found

    def _walk(self, node, function):
        if isinstance(node, ast.JoinedStr):
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            inside = function
            if isinstance(node, ast.FunctionDef) and field == "body":
                inside = function or first(node)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, inside)
        for kind, (start, end), text in self._changes(node):
            yield Mutant(self.path, range(node.lineno, node.lineno + 1), start, end, text, kind,
                         function)

    def _changes(self, node):
        if isinstance(node, (ast.Compare, ast.BoolOp)):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.left, *node.comparators]
            for left, right in zip(parts, parts[1:]):
                between = self.span(left)[1], self.span(right)[0]
                text = OPERATORS.sub(lambda found: OPPOSITE[found[0].decode()].encode(),
                                     self.source[slice(*between)], 1)
                yield "comparison", between, text.decode()
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            value = node.value
            yield "constant", self.span(node), str(
                not value if isinstance(value, bool) else value * 2 if value else 1)
        elif isinstance(node, ast.If):
            start, end = self.span(node.test)
            yield "condition", (start, end), f"not ({self.source[start:end].decode()})"
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield "deleted statement", self.span(node), "pass"
        elif isinstance(node, ast.Return) and node.value is not None:
            yield "deleted result", self.span(node), "return None"
        elif isinstance(node, ast.Call) and len(node.args) > 1 and not any(
                isinstance(of, ast.Starred) for of in node.args[:2]):
            (a, b), (c, d) = map(self.span, node.args[:2])
            text = self.source[c:d] + self.source[b:c] + self.source[a:b]
            yield "swapped arguments", (a, d), text.decode()


def first(node):
    return node.name, min([node.lineno, *(of.lineno for of in node.decorator_list)])


def cpp_mutants(path):
    start = 0
    for number, line in enumerate(Path(ROOT, path).read_text().splitlines(keepends=True), 1):
        code = line.rstrip("\n")
        for kind, pattern, text in CPP:
            changed = re.sub(pattern, text, code, count=1)
            if changed != code and not code.lstrip().startswith(("//", "#", "template")):
                yield Mutant(path, range(number, number + 1), start,
                             start + len(code.encode()), changed, kind, None)
        start += len(line.encode())
