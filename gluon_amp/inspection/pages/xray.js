const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const search = document.querySelector("input[type=search]");
const format = document.getElementById("format"), step = document.getElementById("step");
const chosen = name => document.querySelector(`input[name=${name}]:checked`).value;
const parts = {forward: /^output$/, backward: /gradient/, weights: /^(weight|update)$/};
const percent = share => `${(100 * share).toPrecision(3)} %`;
const nameOf = row => row.tensor + (row.kind === "update" ? ", added" : "");
let module = "", selected = "", places = {};  // a prefix of nodes, a tensor, rows of the heat maps

// ---- which tensors, of which network, step and format

const state = () => data.states[+chosen("state")];
const named = row => nameOf(row).toLowerCase().includes(search.value.toLowerCase())
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
  while (text && context.measureText("…" + text).width > width) text = text.slice(1);
  return "…" + text;
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
  const lines = [`${nameOf(row)} (${row.operator || row.kind}, ${row.format})`];
  if (share !== undefined) lines.push(`2^${exponent}: ${percent(share)}`);
  lines.push(`0: ${percent(row.zero)}`);
  if (row.broken) lines.push(`not finite: ${percent(row.broken)}`);
  if (typeof row.own_snr === "number") lines.push(`rounding: ${row.own_snr} dB`);
  if (typeof row.snr === "number") lines.push(`against float32: ${row.snr} dB`);
  if (typeof row.without_master === "number")
    lines.push(`updates lost without a master: ${percent(row.without_master)}`);
  return lines;
}

function heat(id, rows) {
  const element = document.getElementById(id);
  if (!element.closest("details").open) return;
  if (chosen("order") === "place") rows.sort((a, b) => a.place - b.place);
  const each = rows.length > 60 ? 12 : 16, top = 20;
  const [context, width] = canvas(element, top + rows.length * each + 4);
  const left = each < 16 ? Math.min(250, width * 0.36) : Math.min(320, width * 0.36);
  const extra = 26, cell = (width - left - 2 * extra) / (data.high - data.low + 1);
  const x = exponent => left + extra + (exponent - data.low) * cell;
  const ink = style("--float32"), blue = style("--float16"), red = style("--float8");
  const grey = style("--grey");
  context.font = (each < 16 ? 10 : 12) + "px system-ui, sans-serif";
  rows.forEach((row, r) => {
    const y = top + r * each;
    places[nameOf(row)] = [element, y];
    if (nameOf(row) === selected) {
      context.fillStyle = style("--shade"); context.fillRect(0, y, width, each);
      context.strokeStyle = grey; context.lineWidth = 1;
      context.strokeRect(0.5, y + 0.5, width - 1, each - 1);
    }
    context.fillStyle = row.bad ? red : row.format === "float32" ? grey : ink;
    context.fillText(cut(context, nameOf(row).replace(/^gradient of /, ""), left - 8), 3,
                     y + each / 2);
    const draw = (at, wide, share, color) => {
      if (!share) return;
      context.globalAlpha = Math.min(1, 0.12 + 1.6 * Math.sqrt(share));
      context.fillStyle = color;
      context.fillRect(at, y + 1, wide, each - 2);
      context.globalAlpha = 1;
    };
    draw(left, extra - 5, row.zero, grey);
    row.bins.forEach((share, i) => draw(x(data.low + i), cell + 0.3, share, blue));
    draw(width - extra + 5, extra - 5, row.broken, red);
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
  const rowAt = down => rows[Math.floor((down - top) / each)];
  showValues(element.parentNode, (across, down) => rowAt(down)
    ? values(rowAt(down), Math.floor((across - left - extra) / cell) + data.low) : null);
  element.onclick = event => {
    const row = rowAt(event.clientY - element.getBoundingClientRect().top);
    if (row) location.hash = encodeURIComponent(nameOf(row));
  };
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
  const grey = style("--grey"), blue = style("--float16"), red = style("--float8");
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
  const kind = Object.keys(parts).find(id => ofKind(parts[id]).some(r => nameOf(r) === selected));
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
  const row = state().rows.filter(r => nameOf(r) === selected).map(r => inStep(r))
    .filter(Boolean).map(inFormat)[0];
  aside.hidden = !row;
  if (!row) return;
  const [first, ...lines] = values(row), link = document.createElement("a");
  link.href = "#" + encodeURIComponent(selected);
  link.textContent = first;
  const range = row.bins.map((share, i) => share ? data.low + i : null).filter(e => e !== null);
  if (range.length) lines.unshift(`2^${range[0]} to 2^${range[range.length - 1]}`);
  const close = document.createElement("button");
  close.textContent = "✕"; close.setAttribute("aria-label", "Close");
  close.onclick = () => { history.replaceState(null, "", location.pathname); select(); };
  aside.replaceChildren(link, " · " + lines.join(" · "), close);
}

function draw() {
  places = {};
  document.querySelector("#steps output").textContent = data.numbers[step.value - 1] ?? "all";
  document.querySelector(".estimate").hidden = format.value === data.format;
  document.querySelector(".overflow").hidden = data.states.length < 2 || chosen("state") === "1"
    || !ofKind(parts.backward).some(row => row.broken);
  for (const [id, kind] of Object.entries(parts)) {
    document.getElementById(id).closest("details").hidden = !ofKind(kind).length;
    heat(id, shown(kind));
  }
  windows();
  tree();
  describe();
}

for (const name of Object.keys(data.edges)) format.add(new Option(name));
document.getElementById("states").hidden = data.states.length < 2;
document.getElementById("steps").hidden = !data.numbers.length;
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
