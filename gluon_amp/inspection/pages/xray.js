const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const search = document.querySelector("input[type=search]");
const format = document.getElementById("format"), step = document.getElementById("step");
const chosen = name => document.querySelector(`input[name=${name}]:checked`).value;
const parts = {forward: /^output$/, backward: /gradient/, weights: /^weight$/};
const percent = share => `${(100 * share).toPrecision(3)} %`;
let module = "", selected = "", places = {};  // a prefix of nodes, a tensor, rows of the heat maps

// ---- which tensors, of which network, step and format

const state = () => data.states[+chosen("state")];
const named = row => row.tensor.toLowerCase().includes(search.value.toLowerCase())
  && row.node.startsWith(module);

function inStep(row, number = data.numbers[step.value - 1]) {  // its counts in one step, or in all
  if (number === undefined || parts.weights.test(row.kind)) return row;
  const counts = (state().steps[number] || {})[row.tensor];
  if (!counts) return null;
  const [zero, infinite, broken, first, inside] = counts;
  const bins = row.bins.map((_, i) => inside[i - first] || 0);
  return {...row, zero, infinite, broken, bins, own_snr: null, snr: null};
}

function inFormat(row) {  // the row's counts rounded to the chosen format, instead of the run's
  if (format.value === data.format || row.format === "float32") return row;
  const [least, , beyond] = data.edges[format.value];
  let above = 0, lost = 0, whole = 0;  // a share; squares of the norm
  row.bins.forEach((share, i) => {
    const exponent = data.low + i, square = share * 4 ** exponent;
    whole += square;
    if (exponent >= beyond) above += share;
    if (exponent < least - 1) lost += square;
  });
  const broken = row.infinite + above;
  return {...row, format: format.value, broken, bad: above > 0 || lost > 1e-4 * whole,
          own_snr: null, snr: null};
}

const ofKind = kind => state().rows.filter(row => kind.test(row.kind));
const shown = kind => ofKind(kind).filter(named).map(row => inStep(row)).filter(Boolean)
  .map(inFormat);

// ---- drawing

function cut(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = text.length, short = text;  // of names, the ends differ
  do {
    kept -= 1;
    short = text.slice(0, Math.ceil(kept / 2)) + "…" + text.slice(text.length - Math.floor(kept / 2));
  } while (kept && context.measureText(short).width > width);
  return short;
}

function canvas(element, height) {
  const width = element.parentNode.clientWidth;
  const ratio = Math.min(devicePixelRatio || 1, 16000 / height);  // browsers draw no more pixels
  element.width = width * ratio; element.height = height * ratio;
  element.style.height = height + "px";
  const context = element.getContext("2d");
  context.scale(ratio, ratio); context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle"; context.clearRect(0, 0, width, height);
  return [context, width];
}

function values(row, exponent) {
  const share = row.bins[exponent - data.low];
  const lines = [`${row.tensor} (${row.operator || row.kind}, ${row.format})`];
  if (share !== undefined) lines.push(`2^${exponent}: ${percent(share)}`);
  lines.push(`0: ${percent(row.zero)}`);
  if (row.broken) lines.push(`not finite: ${percent(row.broken)}`);
  if (typeof row.own_snr === "number") lines.push(`rounding: ${row.own_snr} dB`);
  if (typeof row.snr === "number") lines.push(`against float32: ${row.snr} dB`);
  return lines;
}

function fill(context, at, top, wide, high, share, color) {  // a cell: the larger, the stronger
  if (!share) return;
  context.globalAlpha = Math.min(1, 0.25 + 1.5 * Math.sqrt(share));
  context.fillStyle = color;
  context.fillRect(at, top, wide, high);
  context.globalAlpha = 1;
}

function heat(id) {  // a row for each tensor, a column for each power of two or step
  const element = document.getElementById(id);
  if (!element.closest("details").open) return;
  const bySteps = chosen("columns") === "steps" && id !== "weights";
  const rows = bySteps ? ofKind(parts[id]).filter(named).map(inFormat) : shown(parts[id]);
  if (chosen("order") === "place") rows.sort((a, b) => a.place - b.place);
  const each = rows.length > 60 ? 12 : 16, top = 20;
  const [context, width] = canvas(element, top + rows.length * each + 4);
  const left = each < 16 ? Math.min(250, width * 0.36) : Math.min(320, width * 0.36);
  const ink = style("--float32"), red = style("--error"), grey = style("--grey");
  context.font = (each < 16 ? 10 : 12) + "px system-ui, sans-serif";
  rows.forEach((row, r) => {
    const y = top + r * each;
    places[row.tensor] = [element, y];
    if (row.tensor === selected) {
      context.fillStyle = style("--shade"); context.fillRect(0, y, width, each);
      context.strokeStyle = grey; context.lineWidth = 1;
      context.strokeRect(0.5, y + 0.5, width - 1, each - 1);
    }
    context.fillStyle = row.bad ? red : row.format === "float32" ? grey : ink;
    context.fillText(cut(context, row.tensor.replace(/^gradient of /, ""), left - 8), 3,
                     y + each / 2);
  });
  const place = {context, rows, top, each, left, width};
  const columns = bySteps ? stepColumns(place) : powerColumns(place);
  const rowAt = down => rows[Math.floor((down - top) / each)];
  showValues(element.parentNode, (across, down) => rowAt(down)
    ? columns.values(rowAt(down), across) : null);
  element.onclick = event => {
    const box = element.getBoundingClientRect(), row = rowAt(event.clientY - box.top);
    if (!row) return;
    if (bySteps && columns.at(event.clientX - box.left) >= 0)
      step.value = columns.at(event.clientX - box.left) + 1;
    if (row.tensor === selected) draw();
    else location.hash = encodeURIComponent(row.tensor);
  };
}

function powerColumns({context, rows, top, each, left, width}) {
  const extra = 26, cell = (width - left - 2 * extra) / (data.high - data.low + 1);
  const x = exponent => left + extra + (exponent - data.low) * cell;
  const blue = style("--float16"), red = style("--error"), grey = style("--grey");
  rows.forEach((row, r) => {
    const y = top + r * each + 1, high = each - 2;
    fill(context, left, y, extra - 5, high, row.zero, grey);
    row.bins.forEach((share, i) =>
      fill(context, x(data.low + i), y, cell + 0.3, high, share, blue));
    fill(context, width - extra + 5, y, extra - 5, high, row.broken, red);
  });
  context.strokeStyle = red;
  for (const at of data.edges[format.value]) {
    if (at < data.low || at > data.high + 1) continue;
    context.beginPath(); context.moveTo(x(at), top - 3);
    context.lineTo(x(at), top + rows.length * each); context.stroke();
  }
  context.fillStyle = grey; context.textAlign = "center";
  context.font = "11px system-ui, sans-serif";
  context.fillText("0", left + (extra - 5) / 2, 8);
  let last = -1e9;
  for (const tick of [-40, -32, -24, -14, -8, 0, 8, 15, 24]) {
    const at = x(tick) + cell / 2;
    if (at - last < 44 || at > width - extra - 8) continue;
    context.fillText("2^" + tick, at, 8); last = at;
  }
  context.fillText("inf", width - (extra - 5) / 2, 8);
  return {values: (row, across) =>
    values(row, Math.floor((across - left - extra) / cell) + data.low)};
}

function stepColumns({context, rows, top, each, left, width}) {
  const {x, cell, gap, at} = stepAxis(context, left, width, 8);
  const blue = style("--float16"), red = style("--error"), grey = style("--grey");
  rows.forEach((row, r) => data.numbers.forEach((_, i) => {
    const held = counted(row, i), y = top + r * each + 1;
    if (!held) return;
    fill(context, x(i), y, cell - gap, each - 2, below(held),
         row.format === "float32" ? grey : blue);
    fill(context, x(i), y, cell - gap, each - 2, held.broken, red);
  }));
  if (step.value > 0) {
    context.strokeStyle = style("--float32");
    context.strokeRect(x(step.value - 1), top - 1, cell - gap, rows.length * each + 2);
  }
  return {at, values: (row, across) => inOneStep(row, at(across))};
}

// ---- steps as columns

function stepAxis(context, left, width, middle) {  // writes the numbers of steps
  const cell = (width - left) / data.numbers.length, x = i => left + i * cell;
  context.fillStyle = style("--grey"); context.textAlign = "center";
  context.font = "11px system-ui, sans-serif";
  const every = Math.ceil(48 / cell);
  for (let i = 0; i < data.numbers.length; i += every)
    context.fillText(data.numbers[i], Math.min(x(i) + cell / 2, width - 16), middle);
  return {x, cell, gap: cell > 4 ? 1 : 0,
          at: across => across < left ? -1 : Math.floor((across - left) / cell)};
}

function counted(row, i) {
  const held = inStep(row, data.numbers[i]);
  return held && inFormat(held);
}

const below = row => row.bins.reduce((sum, share, i) =>
  sum + (data.low + i < data.edges[format.value][1] ? share : 0), 0);

function range(row) {
  const held = row.bins.map((share, i) => share ? data.low + i : null).filter(e => e !== null);
  return held.length ? [held[0], held[held.length - 1]] : null;
}

function inOneStep(row, i) {
  const held = i in data.numbers ? counted(row, i) : null;
  if (!held) return null;
  const [first, ...lines] = values(held), ends = range(held);
  if (ends) lines.unshift(`2^${ends[0]} to 2^${ends[1]}`);
  lines.push(`below 2^${data.edges[format.value][1]}: ${percent(below(held))}`);
  return [`${first}, step ${data.numbers[i]}`, ...lines];
}

function overSteps(row) {  // the exponents of one tensor, a column for each step
  const element = document.getElementById("history"), figure = element.parentNode;
  figure.hidden = !data.numbers.length || parts.weights.test(row.kind);
  if (figure.hidden) return;
  const steps = data.numbers.map((_, i) => counted(row, i));
  const ends = steps.filter(Boolean).map(range).filter(Boolean).flat();
  const low = Math.min(...ends, 0), high = Math.max(...ends, 0);
  const left = 46, top = 8, bottom = 110, red = style("--error"), grey = style("--grey");
  const [context, width] = canvas(element, 126);
  const {x, cell, gap, at} = stepAxis(context, left, width, 118);
  const line = (bottom - top) / (high - low + 1), y = exponent => bottom - (exponent - low) * line;
  steps.forEach((held, i) => {
    if (!held) return;
    held.bins.forEach((share, b) => fill(
      context, x(i), y(data.low + b + 1), cell - gap, line + 0.3, share, style("--float16")));
    fill(context, x(i), 0, cell - gap, top - 2, held.broken, red);
  });
  context.strokeStyle = red;
  for (const edge of data.edges[format.value]) {
    if (edge < low || edge > high + 1) continue;
    context.beginPath(); context.moveTo(left, y(edge)); context.lineTo(width, y(edge));
    context.stroke();
  }
  context.fillStyle = grey; context.textAlign = "right";
  context.fillText("2^" + high, left - 5, top + 5);
  context.fillText("2^" + low, left - 5, bottom - 5);
  showValues(figure, across => inOneStep(row, at(across)));
}

// ---- loss scales by step

function windows() {
  const {windows, scales, numbers} = state();
  const points = windows.filter(Boolean), left = 46, bottom = 145, top = 10;
  for (const part of document.querySelectorAll(".fits")) part.hidden = !points.length;
  if (!points.length) return;
  const [context, width] = canvas(document.getElementById("window"), 170);
  const powers = points.flat().concat(scales);
  const least = Math.floor(Math.min(...powers)) - 1, most = Math.ceil(Math.max(...powers)) + 1;
  const steps = Math.max(windows.length, 1), wide = (width - left - 8) / steps;
  const y = v => bottom - (v - least) / (most - least) * (bottom - top);
  const grey = style("--grey"), blue = style("--float16"), red = style("--error");
  context.strokeStyle = style("--line"); context.fillStyle = grey; context.textAlign = "right";
  const stride = Math.ceil((most - least) / 7);
  for (let v = least; v <= most; v += stride) {
    context.beginPath(); context.moveTo(left, y(v)); context.lineTo(width - 8, y(v));
    context.stroke();
    context.fillText("2^" + v, left - 5, y(v));
  }
  windows.forEach((fits, step) => {
    if (!fits) return;
    const [low, high] = fits;
    context.globalAlpha = 0.35; context.fillStyle = low <= high ? blue : red;
    context.fillRect(left + step * wide + 1, y(Math.max(low, high)), Math.max(wide - 2, 1),
                     Math.max(2, Math.abs(y(low) - y(high))));
    context.globalAlpha = 1;
  });
  context.strokeStyle = style("--float32"); context.lineWidth = 2; context.beginPath();
  scales.forEach((scale, i) => {
    context.lineTo(left + i * wide, y(scale)); context.lineTo(left + (i + 1) * wide, y(scale));
  });
  context.stroke();
  context.fillStyle = grey; context.textAlign = "center";
  const every = Math.max(1, Math.ceil(steps / Math.floor((width - left) / 40)));
  for (let i = 0; i < steps; i += every) context.fillText(numbers[i], left + (i + 0.5) * wide, bottom + 12);
}

// ---- the tree of modules: a block's name starts the names of its operators

function tree() {
  const root = {prefix: "", parts: new Map(), rows: []};
  const inOrder = [...state().rows].sort((a, b) => (a.place ?? 1e9) - (b.place ?? 1e9));
  for (const row of inOrder.map(inFormat)) {
    let at = root;
    root.rows.push(row);
    for (const word of row.node.split("_amp_cast_")[0].match(/_?[^_]+_?|_+/g) || []) {
      if (!at.parts.has(word))
        at.parts.set(word, {prefix: at.prefix + word, parts: new Map(), rows: []});
      at = at.parts.get(word);
      at.rows.push(row);
    }
  }
  const list = (node, start) => {
    const items = document.createElement("ul");
    for (let part of node.parts.values()) {
      while (part.parts.size === 1 && [...part.parts.values()][0].rows.length === part.rows.length)
        part = [...part.parts.values()][0];  // one name for a chain without branches
      const button = document.createElement("button"), item = document.createElement("li");
      button.textContent = part.prefix.slice(start.length).replace(/_+$/, "");
      button.title = `${part.prefix}: ${part.rows.length} tensors`;
      button.className = part.rows.some(row => row.bad) ? "bad" : "";
      button.setAttribute("aria-pressed", module === part.prefix);
      button.onclick = () => { module = module === part.prefix ? "" : part.prefix; draw(); };
      item.append(button);
      if (part.parts.size > 1) item.append(list(part, part.prefix));
      items.append(item);
    }
    return items;
  };
  document.querySelector(".tree").replaceChildren(list(root, ""));
}

// ---- the selected tensor, which the address of the page names

function select() {
  try { selected = decodeURIComponent(location.hash.slice(1)); } catch { selected = ""; }
  const kind = Object.keys(parts).find(id => ofKind(parts[id]).some(r => r.tensor === selected));
  if (kind) {
    document.getElementById(kind).closest("details").open = true;
    search.value = module = "";
  }
  draw();
  const [element, y] = places[selected] || [];
  if (element) scrollTo(0, scrollY + element.getBoundingClientRect().top + y - innerHeight / 3);
}

function describe() {
  const aside = document.getElementById("selected");
  const row = state().rows.filter(r => r.tensor === selected).map(r => inStep(r))
    .filter(Boolean).map(inFormat)[0];
  aside.hidden = !row;
  if (!row) return;
  const [first, ...lines] = values(row), link = document.createElement("a"), ends = range(row);
  link.href = "#" + encodeURIComponent(selected);
  link.textContent = first;
  if (ends) lines.unshift(`2^${ends[0]} to 2^${ends[1]}`);
  const close = document.createElement("button");
  close.textContent = "✕"; close.setAttribute("aria-label", "Close");
  close.onclick = () => { history.replaceState(null, "", location.pathname); select(); };
  aside.querySelector("p").replaceChildren(link, " · " + lines.join(" · "), close);
  overSteps(ofKind(/./).find(r => r.tensor === selected));
}

function draw() {
  places = {};
  document.querySelector("#steps output").textContent = data.numbers[step.value - 1] ?? "all";
  for (const name of ["power", "step"])
    document.querySelector(`.by-${name}`).hidden = !chosen("columns").startsWith(name);
  document.querySelector(".estimate").hidden = format.value === data.format;
  document.querySelector(".overflow").hidden = data.states.length < 2 || chosen("state") === "1"
    || !ofKind(parts.backward).some(row => row.broken);
  for (const [id, kind] of Object.entries(parts)) {
    document.getElementById(id).closest("details").hidden = !ofKind(kind).length;
    heat(id);
  }
  windows();
  tree();
  describe();
}

for (const name of Object.keys(data.edges)) format.add(new Option(name));
document.getElementById("states").hidden = data.states.length < 2;
for (const control of document.querySelectorAll("fieldset.steps"))
  control.hidden = !data.numbers.length;
step.max = data.numbers.length;
for (const details of document.querySelectorAll("details")) {  // what is long is folded
  const element = details.querySelector("canvas");
  details.open = (element ? ofKind(parts[element.id]) : data.states[0].rows).length <= 60;
  details.addEventListener("toggle", draw);
}
document.getElementById("modules").open = innerWidth > 800;
for (const input of document.querySelectorAll("input, select"))
  input.addEventListener("input", draw);
const ofTable = data.states[0].rows.filter(row => !parts.weights.test(row.kind));
document.querySelectorAll(".tensors tbody tr").forEach((row, i) => {
  const link = document.createElement("a");
  link.href = "#" + encodeURIComponent(ofTable[i].tensor);
  link.append(...row.cells[0].childNodes);
  row.cells[0].append(link);
  search.addEventListener("input", () => { row.hidden = !named(ofTable[i]); });
});
for (const button of document.querySelectorAll(".copy"))
  button.addEventListener("click", () => {
    const line = button.parentNode.querySelector("pre");
    getSelection().selectAllChildren(line);  // what remains where a page may not copy
    Promise.resolve(navigator.clipboard && navigator.clipboard.writeText(line.textContent))
      .then(() => { button.textContent = "Copied"; }, () => document.execCommand("copy"));
  });
addEventListener("resize", draw);
addEventListener("hashchange", select);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
select();
