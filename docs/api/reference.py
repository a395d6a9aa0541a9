"""Writes the entries of docs/api: `python docs/api/reference.py`.

An entry stands between `<!-- gluon_amp.NAME: members -->` and `<!-- end -->`: signature, docstring,
and those of the members. `NAME()` is a class that functions return: it has no signature. What
stands outside of entries, such as the examples, is written by hand. The last section of a
docstring is left out if it is `Internal:`.
"""
import importlib
import inspect
import re
import textwrap
from pathlib import Path

PAGES = sorted(Path(__file__).parent.glob("*.md"))
MARKER = r"(?ms)^<!-- (gluon_amp\.[\w.]+)(\(\))?(?:: ([\w, \n]+?))? -->\n.*?^<!-- end -->$"
TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises",
          "Attributes": "Attributes", "Yields": "Yields"}


def main():
    for path in PAGES:
        path.write_text(page(path))


def page(path):
    """Returns the text of a page with its entries."""
    return re.sub(MARKER, entry, path.read_text())


def entry(marker):
    """Returns the entry of a marker, with the marker."""
    name, returned, members = marker.groups()
    obj, head = find(name), marker[0].partition(" -->\n")[0] + " -->"
    short = name.replace("gluon_amp.", "", 1)
    parts = [head, f'<a id="{name}"></a>', f"## {short}",
             "" if returned or inspect.ismodule(obj) else signature(name, obj), body(obj)]
    for member in re.split(r",\s*", members) if members else ():
        value = inspect.getattr_static(obj, member)
        is_property = isinstance(value, property)
        title = f"{short.rpartition('.')[2]}.{member}"
        parts += [f"### {title}",
                  "" if is_property else signature(title, getattr(obj, member), bound=True),
                  body(value.fget if is_property else getattr(obj, member))]
    return "\n\n".join([*filter(None, parts), "<!-- end -->"])


def find(name):
    """Returns the object of a dotted name."""
    module, *rest = name.split(".")
    obj = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        try:
            obj = getattr(obj, part)
        except AttributeError:
            obj = importlib.import_module(module)
    return obj


def signature(name, obj, bound=False):
    """Returns a code block with the call: names of arguments and defaults, without types."""
    parameters = list(inspect.signature(obj).parameters.values())
    if bound and parameters and parameters[0].name == "self":
        del parameters[0]
    call = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    text = re.sub(r"<[\w.]*?(\w+) object at .*?>|<class '[\w.]*?(\w+)'>", r"\1\2", str(call))
    if len(name + text) > 100:
        text = f"({','.join(f'{chr(10)}    {p}' for p in re.split(', (?=[*/a-z_])', text[1:-1]))})"
    return f"```text\n{name}{text}\n```"


def body(obj):
    """Returns a docstring as Markdown."""
    doc = (inspect.getdoc(obj) or "").partition("\n\nInternal:\n")[0]
    parts = re.split(rf"(?m)^({'|'.join(TITLES)}):$\n", doc)
    text = [paragraphs(parts[0])]
    for title, section in zip(parts[1::2], parts[2::2]):
        section = textwrap.dedent(section.strip("\n"))
        items = re.findall(r"(?m)^([^\s:][^:\n]*): ((?:.*\n?)(?:(?:[ ]+.*|[ ]*)\n?)*)", section)
        if title in ("Returns", "Yields") or not items:
            text.append(f"**{TITLES[title]}**: {paragraphs(section)}")
        else:
            lines = [f"- `{name}`: {' '.join(value.split())}" for name, value in items]
            text.append(f"**{TITLES[title]}**\n\n" + "\n".join(lines))
    return "\n\n".join(filter(None, text))


def paragraphs(text):
    """Returns paragraphs of a docstring; indented ones are code."""
    blocks = re.split(r"\n\n(?=\S)|\n\n(?=[ ]{4})(?<!\n\n\n)", text.strip("\n"))
    result, code = [], []
    for block in [*blocks, ""]:
        if block.startswith("    "):
            code.append(block.rstrip())
            continue
        if code:
            result.append("```text\n" + textwrap.dedent("\n\n".join(code)) + "\n```")
            code = []
        result.append(block.strip())
    return "\n\n".join(filter(None, result))


if __name__ == "__main__":
    main()
