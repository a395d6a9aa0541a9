"""README.md and docs/: code blocks run, commands exist, and Sphinx builds the site."""
import argparse
import ast
import contextlib
import doctest
import functools
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gluon_amp
import matplotlib
import mxnet as mx
import numpy as np
import processes
import pytest
from gluon_amp.policy import get_policy
from gluon_amp.tools.cli import main as gluon_amp_command
from markdown_it import MarkdownIt
from software_gpu.__main__ import parser as software_gpu_parser
from sybil.document import Document
from sybil.parsers.markdown import CodeBlockParser

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")),
         *sorted((ROOT / "docs" / "api").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorial").glob("*.md"))  # tests/test_tutorial.py runs them
COMMANDS = {"sh", "console"}
# Not run: output of commands, and Sphinx's own blocks.
LANGUAGES = {"python", "python process", "output", "diff", "diff mxnet", "text", "text mxnet",
             *COMMANDS}
# MXNet without gluon_amp, imported with the names removed from numpy. Each line of stdin is the
# path of code, which a fork runs.
MXNET_ALONE = f"""import gc, os, runpy, sys
runpy.run_path({str(ROOT / "gluon_amp" / "numpy_names.py")!r})["install"]()
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
gc.freeze()
for path in map(str.strip, sys.stdin):
    fork = os.fork()
    if fork == 0:
        os.dup2(os.open(path + ".out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
        os.dup2(1, 2)
        exec(open(path).read(), dict(mx=mx, autograd=autograd, gluon=gluon, nn=nn))
        break
    os.waitpid(fork, 0)
    print(flush=True)
"""


class MXNetAlone:
    """Runs code in forks of one process that has imported MXNet."""

    def __init__(self):
        self.folder, self.process = tempfile.TemporaryDirectory(), None

    def output(self, code):
        """Stdout and stderr of the code."""
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", MXNET_ALONE], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
                env=processes.environment(PYTHONPATH=processes.WITHOUT))
        path = Path(self.folder.name, "code")
        path.write_text(code)
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        return path.with_name("code.out").read_text()

    def close(self):
        if self.process:
            self.process.communicate()
        self.folder.cleanup()


with_code = pytest.mark.parametrize(
    "page", [page for page in PAGES
             if "```" in page.read_text() and page.name not in ("index.md", "howto.md")],
    ids=lambda page: page.name)
each_page = pytest.mark.parametrize("page", PAGES + NOTEBOOKS, ids=lambda page: page.name)


def of_page(page):
    """The tokens of a page, without those of Sphinx."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [t for token in tokens for t in [token, *(token.children or [])]
            if not token.info.startswith("{")]


# ---- code blocks -----------------------------------------------------------


class Runner:
    """Runs the blocks of a page in order, in one namespace.

    python           is run
    python process   is run in a new process, after the preceding python blocks of the page
    output           is the output of the blocks since the last one, `...` for any text
    diff             is two scripts, both of which are run; the names of the new one remain
    diff mxnet       is the same, with the old one in a process without gluon_amp: it fails, or
                     prints the `text mxnet` before it
    """

    def __init__(self):
        self.printed = io.StringIO()
        self.ran = ""
        self.expected = None
        self.alone = MXNetAlone()
        self.parsers = [CodeBlockParser("python", self.python),
                        CodeBlockParser("python process", self.process),
                        CodeBlockParser("output", self.output), CodeBlockParser("diff", self.diff),
                        CodeBlockParser("diff mxnet", self.diff_mxnet),
                        CodeBlockParser("text mxnet", self.message)]

    def run(self, page):
        # names such as dense0_ start from 0
        with mx.name.NameManager(), contextlib.closing(self.alone):
            for example in Document.parse(str(page), *self.parsers):
                example.evaluate()

    def python(self, example, source=None, names=None):
        lines = "\n" * (example.line + example.parsed.line_offset)
        code = compile(lines + (source or example.parsed), example.path, "exec")
        with contextlib.redirect_stdout(self.printed):
            exec(code, example.namespace if names is None else names)
        self.ran += (source or example.parsed) + "\n"

    def process(self, example):
        code = (f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n"
                f"    exec({self.ran!r})\nexec({example.parsed!r})")
        with tempfile.TemporaryDirectory() as folder:
            self.printed.write(processes.printed(code, folder=folder,
                                                 **processes.WITH_ALL))

    @staticmethod
    def both(example):
        lines = example.parsed.splitlines()
        assert {line[:1] for line in lines} <= set("+- ") | {""}, "a line without its mark"
        return ["\n".join("" if line[:1] in gone else line[1:] for line in lines)
                for gone in "+-"]

    def diff(self, example):
        old, new = self.both(example)
        self.python(example, old, dict(example.namespace))
        self.python(example, new)

    def message(self, example):
        self.expected = example.parsed

    def diff_mxnet(self, example):
        old, new = self.both(example)
        expected, self.expected = self.expected, None
        assert expected, "no text mxnet before it"
        if "import mxnet" in old:
            done = processes.run("-c", old, folder=".", PYTHONPATH="")
            printed = done.stdout + done.stderr
            if "bool" in vars(np):
                expected = "Error"  # numpy 2 has another np.bool, and lacks some names
        else:
            printed = self.alone.output(old)
        if expected.strip() not in printed:
            raise AssertionError(f"{example.path}:{example.line}: MXNet alone prints\n{printed}")
        self.python(example, new)

    def output(self, example):
        printed, self.printed = self.printed.getvalue(), io.StringIO()
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if not doctest.OutputChecker().check_output(example.parsed, printed, flags):
            raise AssertionError(f"{example.path}:{example.line}: it prints\n{printed}")


@with_code
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Runner().run(page)


@pytest.mark.thorough
def test_each_section_of_howto_runs_after_the_set_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, set_up, *sections = re.split(
        r"(?m)^(?=## )", (ROOT / "docs" / "howto.md").read_text())
    assert set_up.startswith("## Set-up\n")
    for section in sections:
        page = tmp_path / "section.md"
        page.write_text(set_up + section)
        Runner().run(page)


@pytest.mark.parametrize("number", [0, 1])
def test_each_script_of_readme_can_be_pasted(number, tmp_path):
    script = [t.content for t in of_page(ROOT / "README.md") if t.info == "python"][number]
    assert "\n\n " not in script, "an empty line ends a pasted block"
    done = processes.run("-c", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_readme_names_the_pythons_of_the_package():
    project = (ROOT / "pyproject.toml").read_text()
    versions = re.findall(r"Python :: (3\.\d+)", project)
    shown = f"{versions[0]} to {versions[-1]}"
    assert f"Python: {shown}" in (ROOT / "docs" / "badges" / "python.svg").read_text()
    assert f"[![Python {shown}]" in (ROOT / "README.md").read_text()


def test_figures_of_readme_are_those_of_the_results():
    """Accuracies, and steps and memory of three networks, from the pages with all figures."""
    rows = [row.split("|")[1:-1] for row in (ROOT / "README.md").read_text().splitlines()
            if row.startswith("|")]
    table = {label.strip(): [cell.strip() for cell in cells] for label, *cells in rows}
    accuracy = (ROOT / "results" / "comparisons.md").read_text()
    cells = next(cells for label, cells in table.items() if label.startswith("change in accuracy"))
    for arm, cell in zip(("float16", "bfloat16"), cells):
        number = re.escape(cell.replace(" points", ""))
        assert re.search(rf"\| digits \| AMD EPYC, Zen 5 \| {arm} \| .*\| {number} \|",
                         accuracy), arm
    speeds = (ROOT / "benchmarks" / "README.md").read_text()
    of = {start: next(cells for label, cells in table.items() if label.startswith(start))
          for start in ("[step on a CPU]", "memory of")}
    for i, network in enumerate(("resnet50 224px b8", "mobilenetv2 128px b8", "bert-base b4")):
        measured = [[cell.partition(" (")[0] for cell in row.split(" | ")] for row in re.findall(
            rf"(?m)^\| {network} \| (.*) \|$", speeds)]
        for column in (0, 1):
            assert any(of["[step on a CPU]"][column].split(", ")[i] in row
                       and of["memory of"][column].split(", ")[i] in row for row in measured)


@each_page
def test_every_block_has_a_language(page):
    """A block without a language would not be tested."""
    for token in of_page(page):
        assert token.type != "code_block", f"line {token.map[0] + 1}: indented, not fenced"
        if token.type == "fence":
            assert token.info in LANGUAGES, f"line {token.map[0] + 1}: {token.info!r}"


# ---- commands --------------------------------------------------------------


class Parsed(BaseException):
    """The script has parsed its arguments; it shall not run."""


def parse(main, arguments, monkeypatch):
    """Returns the parser, or None after --help."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self, args=None, namespace=None):
        parse_args(self, args, namespace)
        raise Parsed(self)

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises((Parsed, SystemExit)) as raised:
            main(arguments)
    if raised.type is SystemExit and raised.value.code != 0:  # 0: --help
        raise raised.value
    return raised.value.args[0] if raised.type is Parsed else None


def check_command(line, monkeypatch):
    """An error if a command, its script or one of its arguments does not exist."""
    words = shlex.split(re.sub(r"^\$ ", "", line), comments=True)
    while words and re.match(r"\w+=", words[0]):
        del words[0]  # variables of the environment
    if not words:
        return
    program, *arguments = words
    if program == "make":
        folder = ROOT / arguments[1] if arguments[:1] == ["-C"] else ROOT
        arguments = arguments[2:] if arguments[:1] == ["-C"] else arguments
        targets = re.findall(r"^([\w.-]+):(?!=)", (folder / "Makefile").read_text(), re.M)
        assert {a for a in arguments if "=" not in a and a != "-B"} <= set(targets)
    elif program == "pip":
        project = (ROOT / "pyproject.toml").read_text()
        extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
        known = re.findall(r"^([\w-]+) = \[", extras, re.M)
        for names in re.findall(r"(?:^|\s)(?:\.|gluon-amp)\[([\w,-]+)\]", " ".join(arguments)):
            assert set(names.split(",")) <= set(known)
    elif program == "gluon-amp":
        parse(gluon_amp_command, arguments, monkeypatch)
    elif program == "python" and arguments[0].startswith("example/"):
        script = ROOT / arguments[0]
        assert script.exists()
        monkeypatch.syspath_prepend(str(script.parent))
        parse(importlib.import_module(script.stem).main, arguments[1:], monkeypatch)
    elif arguments[0] == "tests/software_gpu":
        software_gpu_parser().parse_args(arguments[1:])
        check_command(shlex.join(arguments[arguments.index("python"):]), monkeypatch)
    elif arguments[:2] == ["-m", "gluon_amp"]:
        assert arguments[2] == "--dtype"
        get_policy(arguments[3])
    elif program in ("python", "bash"):
        assert (ROOT / arguments[0]).exists()
    else:
        assert program in ("apt", "cd"), f"nobody looks after {program}"


def commands(page):
    """The lines of shell blocks, and the commands with arguments in running text."""
    for token in of_page(page):
        if token.type == "fence" and token.info in COMMANDS:
            yield from token.content.replace("\\\n", " ").splitlines()
        elif token.type == "code_inline" and re.match(
                r"(\w+=\S+ )?(make|gluon-amp|python example/\S+|pip install) \S", token.content):
            named_only = re.fullmatch(r"gluon-amp \w+", token.content)
            yield token.content + " --help" * bool(named_only)


@each_page
def test_commands_exist(page, monkeypatch, capsys):
    for line in commands(page):
        try:
            check_command(line, monkeypatch)
        except (AssertionError, SystemExit) as error:
            pytest.fail(f"{line}: {capsys.readouterr().err or error}")


def test_scripts_have_flags_of_table(monkeypatch):
    """The last two columns of the tables are flags of this project's scripts."""
    rows = re.findall(r"(?m)^\| (?:`--.* )?\|.*\|.*\|.*\|$",
                       (ROOT / "docs" / "flags.md").read_text())
    assert len(rows) > 25
    for row in rows:
        *_, symbolic, gluon = row.split("|")[1:-1]
        for script, cell in (("train_imagenet", symbolic), ("image_classification", gluon)):
            named = re.search(r"(\w+)\.py: (.*)", cell)
            script, cell = named.groups() if named else (script, cell)
            needed = ["--pretrained-model", "net"] if script == "symbolic_fine_tune" else []
            parser = parse(importlib.import_module(script).main, needed, monkeypatch)
            for flag in re.findall(r"--?[a-z][\w-]*(?=[` ])", cell):
                assert flag in parser._option_string_actions, (script, row)


@functools.lru_cache(maxsize=None)
def anchors(page):
    """The anchors of a page's headings, as GitHub and Sphinx make them, and its own."""
    tokens = of_page(page)
    titles = ["".join(child.content for child in following.children) for token, following in
              zip(tokens, tokens[1:]) if token.type == "heading_open"]
    made = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    twice = {f"{slug}-1" for slug in made if made.count(slug) > 1}
    return {*made, *twice, *re.findall(r'id="(.*?)"', page.read_text()),
            *re.findall(r"(?m)^\((.*?)\)=$", page.read_text())}


@each_page
def test_links_have_targets(page):
    for token in of_page(page):
        links = [(token.attrs or {}).get(name, "") for name in ("href", "src")]
        if token.type == "html_block":
            links += re.findall(r'(?:src|srcset|href)="(.*?)"', token.content)
        for where in (one for one in links if "://" not in one):
            path, _, anchor = where.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), where
            assert target.suffix != ".md" or not anchor or anchor in anchors(target), where


def test_pages_of_gpus_are_what_their_script_writes(tmp_path):
    pages = ["results/gpu/h100/README.md", "results/gpu/h200/README.md", "benchmarks/README.md",
             "README.md"]
    shutil.copytree(ROOT / "results" / "gpu", tmp_path / "results" / "gpu")
    for page in pages:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    for page in pages[:2]:
        (tmp_path / page).unlink()
    subprocess.run([sys.executable, tmp_path / "results" / "gpu" / "cards.py"], check=True)
    for page in pages:
        assert (tmp_path / page).read_text() == (ROOT / page).read_text()


# ---- messages --------------------------------------------------------------


def texts_of_package():
    """The strings of the package, with \\0 for values."""
    for path in (ROOT / "gluon_amp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(getattr(part, "value", "") if isinstance(part, ast.Constant)
                              else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


OF_PYTHON = {"invalid literal for int()", "unexpected keyword argument"}


def test_messages_of_the_page_are_those_of_the_package():
    texts = "\n".join(texts_of_package())
    table = (ROOT / "docs" / "errors.md").read_text().partition("## Messages of gluon_amp")[2]
    messages = re.findall(r"(?m)^\| `([^`]*)`", table.partition("\n## ")[0])
    assert len(messages) > 15
    for message in messages:
        parts = [part.strip() for part in re.split(r"\.\.\.|^\w+Error: ", message)]
        for part in filter(None, parts):
            assert part in texts or any(own in message for own in OF_PYTHON), message


# ---- Sphinx ----------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site as of `make docs`, in another folder, without running the notebooks."""
    html = tmp_path_factory.mktemp("site") / "html"
    sphinx = "-m sphinx -W --keep-going -n -q -b html -D nb_execution_mode=off".split()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *sphinx, "-d", str(html / "doctrees"),
         str(ROOT / "docs"), str(html)],
        env={**os.environ, "OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return html


@pytest.mark.thorough
def test_sphinx_builds_without_warnings(built):
    for page in (ROOT / "docs").rglob("*.md"):
        text = (built / page.relative_to(ROOT / "docs").with_suffix(".html")).read_text()
        assert "<h1>" in text
        assert "system-message" not in text


@pytest.mark.thorough
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_notebook_can_be_downloaded_from_its_page(built, page):
    text = (built / "tutorial" / f"{page.stem}.html").read_text()
    file = re.search(r'href="\.\./(_downloads/\w+/[\w-]+\.ipynb)"', text)[1]
    cells = json.loads((built / file).read_text())["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert "{nb-download}" not in page.read_text()
    for cell in cells:
        text = "".join(cell["source"])
        assert "{nb-download}" not in text
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
            assert picture.startswith("data:image/png;base64,")


@pytest.mark.thorough
def test_links_to_included_pages_stay_in_site(built):
    """Links between pages stay in the site, and links to scripts download them."""
    readme = (built / "readme.html").read_text()
    for link in ("results.html", "benchmarks.html", "imagenet.html", "contributing.html",
                 "tutorial.html", r"_downloads/\w+/fine_tune.py"):
        assert re.search(f'href="{link}"', readme), link
    assert 'href="readme.html' in (built / "index.html").read_text()


@pytest.mark.thorough
def test_every_picture_has_a_dark_variant(built):
    for page in "index", "tensor_core_results", "tutorial/ten_minutes", "imagenet":
        images = re.findall(r'<img[^>]*class="([^"]*)"', (built / f"{page}.html").read_text())
        light, dark = ([i for i in images if f"only-{which}" in i] for which in ("light", "dark"))
        assert len(light) == len(dark) > 0, page
    text = (built / "imagenet.html").read_text()
    assert re.search(r'<div class="narrow[^>]*>\s*<p><img alt="Top-1[^>]*published_narrow', text)


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_notebook_lines_fit_80_columns(page):
    assert [line for line in page.read_text().splitlines() if len(line) > 80] == []


@pytest.mark.thorough
def test_first_page_shows_an_xray(built):
    tensor = "net_batch_dot0_amp_cast_float16"
    first = (built / "index.html").read_text()
    assert f'<iframe class="live" src="live_xray.html#{tensor}"' in first
    page = (built / "live_xray.html").read_text()
    assert f'"{tensor}"' in page
    assert 'overflow begins in <a href="#net_batch_dot0">net_batch_dot0</a>' in page
    assert "amp.convert(net, keep=[" in page
    assert str(ROOT) not in page


@pytest.mark.thorough
def test_every_public_name_is_in_reference(built):
    reference = "".join(page.read_text() for page in (built / "api").glob("*.html"))
    for name in gluon_amp.__all__:
        assert f'id="gluon_amp.{name}"' in reference, name
    overview, guide = ((built / page).read_text() for page in ("api.html", "guide.html"))
    linked = re.findall(r'href="api/\w+.html#gluon_amp\.(\w+)[."]', overview)
    assert {*gluon_amp.__all__} <= set(linked)
    assert 'href="api/networks.html#gluon_amp.convert"' in guide
    assert '<span class="column">' in overview  # on a phone, before cells of tables with headings


def test_reference_is_what_its_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "api"))
    import reference
    entries = {}
    for path in reference.PAGES:
        text = path.read_text()
        assert reference.page(path) == text, "run python docs/api/reference.py"
        entries.update(re.findall(r'(?s)<a id="(gluon_amp\.[\w.]+)"></a>(.*?)<!-- end -->', text))
    assert {f"gluon_amp.{name}" for name in gluon_amp.__all__} <= set(entries)
    for name, text in entries.items():
        for described in re.split(r"(?m)^##+ .*$", text)[1:]:
            assert re.sub(r"(?s)```.*?```", "", described).strip(), name


@pytest.mark.thorough
def test_every_figure_is_drawn_by_its_script(tmp_path, monkeypatch):
    """With short trainings, which change only the curves."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import figures
    for name, small in (("STEPS", 3), ("STEPS_OF_SCALE", 20)):
        monkeypatch.setattr(figures, name, small)
    with matplotlib.rc_context():
        figures.draw(tmp_path)
    text = "".join(page.read_text() for page in PAGES + NOTEBOOKS)
    used = re.findall(r"\((?:\.\./)?figures/([\w]+\.png)", text)
    assert {path.name for path in tmp_path.iterdir()} == set(used)
    assert {path.name for path in (ROOT / "docs" / "figures").iterdir()} == set(used)
