"""The style of pages of reports and X-rays, and the script that sorts their tables."""
from string import Template
from typing import Dict

from .colors import COLORS, DARK


def _variables(colors: Dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


STYLE = Template("""\
:root { color-scheme: light dark; --paper: #fff; --line: #ccd; --shade: #f4f5f8; --grey: #6b7078;
        --shadow: #0003; $light }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181d; --line: #3a3f4a; --shade: #20242c; --grey: #9aa0aa;
          --shadow: #fff4; $dark }
}
body { color: var(--float32); background: var(--paper); font: 16px/1.5 system-ui, sans-serif;
       max-width: 84rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2rem 0 0.5rem; }
figure { margin: 0; position: relative; min-width: 0; }
.tip { position: absolute; z-index: 1; pointer-events: none; background: var(--paper);
       border: 1px solid var(--line); border-radius: 4px; padding: 0.2rem 0.5rem;
       font-size: 0.8rem; box-shadow: 0 1px 4px var(--shadow); }
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 3rem 100% local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 3rem 100% local,
  linear-gradient(to right, var(--shadow), transparent) left / 1rem 100% scroll,
  linear-gradient(to left, var(--shadow), transparent) right / 1rem 100% scroll;
  background-repeat: no-repeat; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.6rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--float16); }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
tbody tr:hover { background: var(--shade); }""").substitute(
    light=_variables(COLORS), dark=_variables(DARK))

SORTING = """\
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("th")];
  for (const [column, th] of heads.entries()) {
    th.firstChild.addEventListener("click", () => {
      const up = th.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = row => row.cells[column].textContent.replace(/%|2\\^/, "");
      const order = (a, b) => {  // empty cells last, numbers as numbers
        const [x, y] = [value(a), value(b)];
        if (!x || !y) return !x - !y;
        return (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y) * (up ? 1 : -1);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  }
}"""
