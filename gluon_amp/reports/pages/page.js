// Tables sort by the column that is clicked.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("th")];
  for (const [column, th] of heads.entries()) {
    th.firstChild.addEventListener("click", () => {
      const up = th.getAttribute("aria-sort") !== "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      th.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = row => row.cells[column].textContent.replace(/%|2\^/, "");
      const order = (a, b) => {  // empty cells last, numbers as numbers
        const [x, y] = [value(a), value(b)];
        if (!x || !y) return !x - !y;
        return (isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y) * (up ? 1 : -1);
      };
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
    });
  }
}

// A table that is wider than the page has a hint below.
const hint = () => {
  for (const wide of document.querySelectorAll(".wide"))
    wide.classList.toggle("scrolls", wide.scrollWidth > wide.clientWidth + 1);
};
addEventListener("resize", hint);
for (const details of document.querySelectorAll("details"))
  details.addEventListener("toggle", hint);
hint();

// A figure shows the lines of text that `linesAt` returns for the pointer's place, if any.
function showValues(figure, linesAt, leave = () => {}) {
  const shape = figure.querySelector("svg, canvas"), tip = document.createElement("div");
  tip.className = "tip";
  shape.onpointerleave = () => { tip.remove(); leave(); };
  shape.onpointermove = event => {
    const box = shape.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const lines = linesAt(x, y, box);
    if (!lines) return shape.onpointerleave();
    tip.textContent = "";
    for (const text of lines) tip.append(text, document.createElement("br"));
    figure.append(tip);
    tip.style.left = `${Math.max(0, Math.min(x + 12, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${y > tip.offsetHeight + 8 ? y - tip.offsetHeight - 8 : y + 14}px`;
  };
}
