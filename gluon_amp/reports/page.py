"""The page of a report, with its style and script; it loads no other files."""
from string import Template

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style
.verdicts { list-style: none; padding: 0; max-width: 60rem; }
.verdicts li { border-left: 4px solid var(--line); padding: 0.2rem 0 0.2rem 0.8rem;
               margin: 0.6rem 0; }
.verdicts b { display: block; }
.verdicts .same { border-color: var(--bfloat16); }
.verdicts .different { border-color: var(--float8); }
.hint { display: none; color: var(--grey); font-size: 0.85rem; margin: 0; }
.scrolls + .hint { display: block; }
$columns
input[type=search] { font: inherit; font-size: 0.9rem; padding: 0.2rem 0.5rem; margin: 0.5rem 0;
                     width: min(100%, 20rem); box-sizing: border-box; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr));
         gap: 1.5rem; margin: 1.5rem 0; }
figure svg { width: 100%; height: auto; display: block; max-width: 40rem; }
figcaption, details, dl { font-size: 0.85rem; }
figcaption { color: var(--grey); max-width: 40rem; }
.tip { white-space: nowrap; }
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
$sorting
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
