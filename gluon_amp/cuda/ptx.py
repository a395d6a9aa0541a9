"""Edits PTX: selects kernels, renames anonymous namespaces, and limits registers."""
import re
from typing import Dict, Iterable, List, NamedTuple, Set, Tuple

from .elf import Parameter

_NAME = re.compile(r"[\w$]+")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")
_FUNCTION = re.compile(r"\.func\s*(?:\([^)]*\)\s*)?([\w$]+)")
_VARIABLE = re.compile(r"([\w$]+)\s*(?:\[[^\]]*\]\s*)*$")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[a-z]*(\d+)\s[^,]*?(?:\[(\d+)\])?\s*$")
_VERSION = re.compile(r"(?m)^\.version \d+\.\d+$")
# The name of an anonymous namespace, as nvcc 11.2 wrote it for the wheel, and as nvcc 13 does. It
# contains the name of a temporary file, so no two builds agree.
_WHEELS_NAMESPACE = re.compile(r"_GLOBAL__N__\d+_tmpxft_\w+?_cpp1_ii_[0-9a-f]{8}")
_OUR_NAMESPACE = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")


class Item(NamedTuple):
    """A function, a kernel or a variable, with its text."""
    name: str
    text: str
    is_kernel: bool

    @property
    def has_launch_bounds(self) -> bool:
        return ".maxntid" in self.text.partition("\n{")[0]


class Module(NamedTuple):
    """The lines `.version`, `.target` and `.address_size`, and what follows, in order."""
    header: str
    items: List[Item]

    @property
    def kernels(self) -> List[str]:
        return [item.name for item in self.items if item.is_kernel]

    def __str__(self) -> str:
        return "\n".join([self.header, *(item.text for item in self.items), ""])


def parse(text: str) -> Module:
    """Splits PTX into its items; raises ValueError if it ends within one."""
    header: List[str] = []
    items: List[Item] = []
    lines: List[str] = []
    depth = 0
    for line in text.splitlines():
        code = line.partition("//")[0].rstrip()
        if not lines and (not code or code.startswith((".version", ".target", ".address_size"))):
            if code:
                header.append(code)
            continue
        lines.append(code)
        depth += code.count("{") - code.count("}")
        if depth == 0 and code.endswith((";", "}")):
            items.append(_item("\n".join(filter(None, lines))))
            lines = []
    if lines or len(header) != 3:
        raise ValueError("the compiler's PTX is incomplete: "
                         + (f"it ends within {lines[0][:80]}" if lines else "it has no header"))
    return Module("\n".join(header), items)


def _item(text: str) -> Item:
    entry = _ENTRY.search(text, 0, 4096)
    match = entry or _FUNCTION.search(text, 0, 4096) or _VARIABLE.search(
        text[:4096].partition("=")[0].rstrip().rstrip(";"))
    if match is None:
        raise ValueError(f"the compiler's PTX has a statement of an unknown kind: {text[:80]}")
    return Item(match.group(1), text, entry is not None)


def select(module: Module, kernels: Iterable[str]) -> Module:
    """Returns a module with these kernels, and the functions and variables that they use."""
    others: Dict[str, List[Item]] = {}
    for item in module.items:
        if not item.is_kernel:
            others.setdefault(item.name, []).append(item)
    wanted = set(kernels)
    waiting = [item for item in module.items if item.is_kernel and item.name in wanted]
    used: Set[str] = set()
    while waiting:
        for name in _names(waiting.pop(), others) - used:
            used.add(name)
            waiting += others[name]
    return Module(module.header, [item for item in module.items
                                  if item.name in (wanted if item.is_kernel else used)])


def _names(item: Item, others: Dict[str, List[Item]]) -> Set[str]:
    return set(_NAME.findall(item.text)) & others.keys()


def limit_registers(module: Module, limits: Dict[str, int]) -> Module:
    """Returns a module whose kernels of these names take at most these numbers of registers.

    A kernel with launch bounds keeps them instead: PTX permits one of the two.
    """
    def limited(item: Item) -> Item:
        if item.name not in limits or not item.is_kernel or item.has_launch_bounds:
            return item
        head, brace, body = item.text.partition("\n{")
        return item._replace(text=f"{head}\n.maxnreg {limits[item.name]}{brace}{body}")

    return module._replace(items=[limited(item) for item in module.items])


def parameters(item: Item) -> Tuple[Parameter, ...]:
    """Returns the parameters of a kernel: their order, offsets and sizes in bytes."""
    listed = item.text.partition("(")[2].partition(")")[0]
    layout, end = [], 0
    for ordinal, declaration in enumerate(filter(str.strip, listed.split(","))):
        match = _PARAMETER.search(declaration)
        if match is None:
            raise ValueError(f"unknown parameter of {item.name}: {declaration.strip()}")
        align, bits, count = match.groups()
        size = int(bits) // 8 * int(count or 1)
        alignment = int(align or int(bits) // 8)
        offset = -(-end // alignment) * alignment
        layout.append(Parameter(ordinal, offset, size))
        end = offset + size
    return tuple(layout)


def rename_namespace(text: str, kernels: Iterable[str]) -> str:
    """Gives the anonymous namespace in PTX the name that it has in the wheel's kernels."""
    wanted = {match.group() for match in map(_WHEELS_NAMESPACE.search, kernels) if match}
    if len(wanted) > 1:
        raise ValueError(f"the wheel's file has several anonymous namespaces: {sorted(wanted)}")
    for name in wanted:
        for ours in set(_OUR_NAMESPACE.findall(text)):  # a name is preceded by its length
            text = text.replace(f"{len(ours)}{ours}", f"{len(name)}{name}")
    return text


def with_version(text: str, version: str) -> str:
    """Returns PTX that declares another version of the language."""
    return _VERSION.sub(f".version {version}", text, count=1)
