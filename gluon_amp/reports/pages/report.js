// A field above a table filters its rows.
for (const input of document.querySelectorAll("input[type=search]")) {
  const rows = [...input.parentNode.querySelectorAll("tbody tr")];
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const text = [...row.cells].map(cell => cell.textContent).join(" ").toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
  });
}

// A plot shows the values of its lines at the pointer.
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const hover = JSON.parse(figure.dataset.hover), cursor = document.createElement("div");
  cursor.className = "cursor";
  const at = (points, x) => {  // the nearest point, or of steps the last one before
    let best = null;
    for (const point of points)
      if (hover.steps ? point[0] <= x : !best || Math.abs(point[0] - x) < Math.abs(best[0] - x))
        best = point;
    return best;
  };
  showValues(figure, (left, top, box) => {
    const x = hover.from + (left / box.width - hover.left) / (hover.right - hover.left)
      * (hover.to - hover.from);
    if (x < hover.from || x > hover.to) return null;
    figure.append(cursor);
    cursor.style.left = `${left}px`;
    cursor.style.height = `${box.height}px`;
    return [`${hover.unit}: ${x.toPrecision(3)}`, ...hover.lines.flatMap(line => {
      const point = at(line.points, x);
      return point ? [`${line.name}: ${point[1]}`] : [];
    })];
  }, () => cursor.remove());
}
