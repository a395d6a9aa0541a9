"""The page of a report: its style and its script. It asks for nothing from elsewhere."""
from string import Template

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --line: #ccd; --shade: #f4f5f8; --grey: #6b7078;
        --shadow: #0003; $light }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181d; --line: #3a3f4a; --shade: #20242c; --grey: #9aa0aa;
          --shadow: #fff4; $dark }
}
body { color: var(--float32); background: var(--paper); font: 16px/1.5 system-ui, sans-serif;
       max-width: 84rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.25rem; margin: 2rem 0 0.5rem; }
.verdicts { list-style: none; padding: 0; max-width: 60rem; }
.verdicts li { border-left: 4px solid var(--line); padding: 0.2rem 0 0.2rem 0.8rem;
               margin: 0.6rem 0; }
.verdicts b { display: block; }
.verdicts .same { border-color: var(--bfloat16); }
.verdicts .different { border-color: var(--float8); }
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 30%, transparent) left / 3rem 100% local,
  linear-gradient(to left, var(--paper) 30%, transparent) right / 3rem 100% local,
  linear-gradient(to right, var(--shadow), transparent) left / 1rem 100% scroll,
  linear-gradient(to left, var(--shadow), transparent) right / 1rem 100% scroll;
  background-repeat: no-repeat; }
.hint { display: none; color: var(--grey); font-size: 0.85rem; margin: 0; }
.scrolls + .hint { display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.3rem 0.6rem; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { vertical-align: bottom; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid var(--float16); }
th[aria-sort=ascending] button::after { content: " \\25b2"; }
th[aria-sort=descending] button::after { content: " \\25bc"; }
tbody tr:hover { background: var(--shade); }
$columns
input[type=search] { font: inherit; font-size: 0.9rem; padding: 0.2rem 0.5rem; margin: 0.5rem 0;
                     width: min(100%, 20rem); box-sizing: border-box; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr));
         gap: 1.5rem; }
figure { margin: 0; position: relative; min-width: 0; }
figure svg { width: 100%; height: auto; display: block; max-width: 40rem; }
figcaption, details, dl { font-size: 0.85rem; }
figcaption { color: var(--grey); max-width: 40rem; }
.tip { position: absolute; z-index: 1; pointer-events: none; background: var(--paper);
       border: 1px solid var(--line); border-radius: 4px; padding: 0.2rem 0.5rem;
       font-size: 0.8rem; white-space: nowrap; box-shadow: 0 1px 4px var(--shadow); }
.cursor { position: absolute; top: 0; width: 1px; background: var(--grey); pointer-events: none; }
summary { cursor: pointer; margin: 1rem 0 0.5rem; }
li, dd { overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: 0 1rem; }
dt { overflow-wrap: anywhere; }
dd { margin: 0; }
</style>
</head>
<body>
<h1>$title</h1>
$body
<script>
"use strict";
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("th")];
  for (const [column, th] of heads.entries()) {
    th.firstChild.addEventListener("click", () => {
      const up = th.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = row => row.cells[column].textContent;
      const order = (a, b) => {  // empty cells last, numbers as numbers
        const [x, y] = [value(a), value(b)];
        if (!x || !y) return !x - !y;
        return (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y) * (up ? 1 : -1);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  }
}
for (const input of document.querySelectorAll("input[type=search]")) {
  const rows = [...input.parentNode.querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\\s+/);
    for (const row of rows) {
      const text = [...row.cells].map(cell => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}
const hint = () => {
  for (const wide of document.querySelectorAll(".wide"))
    wide.classList.toggle("scrolls", wide.scrollWidth > wide.clientWidth + 1);
};
addEventListener("resize", hint);
for (const details of document.querySelectorAll("details"))
  details.addEventListener("toggle", hint);
hint();
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const hover = JSON.parse(figure.dataset.hover), svg = figure.querySelector("svg");
  const tip = document.createElement("div"), cursor = document.createElement("div");
  tip.className = "tip"; cursor.className = "cursor";
  const leave = () => { tip.remove(); cursor.remove(); };
  const at = (points, x) => {  // the nearest point, or of steps the last one before
    let best = null;
    for (const point of points)
      if (hover.steps ? point[0] <= x : !best || Math.abs(point[0] - x) < Math.abs(best[0] - x))
        best = point;
    return best;
  };
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), span = hover.right - hover.left;
    const x = hover.from + ((event.clientX - box.left) / box.width - hover.left) / span
      * (hover.to - hover.from);
    if (x < hover.from || x > hover.to) return leave();
    tip.textContent = "";
    for (const text of [`$${hover.unit}: $${x.toPrecision(3)}`, ...hover.lines.map(line => {
      const point = at(line.points, x);
      return point ? `$${line.name}: $${point[1]}` : "";
    })].filter(Boolean)) tip.append(text, document.createElement("br"));
    figure.append(tip, cursor);
    cursor.style.left = `$${event.clientX - box.left}px`;
    cursor.style.height = `$${box.height}px`;
    tip.style.left =
      `$${Math.max(0, Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth))}px`;
    tip.style.top = `$${Math.max(0, event.clientY - box.top - tip.offsetHeight - 8)}px`;
  });
  svg.addEventListener("pointerleave", leave);
}
</script>
</body>
</html>
""")
