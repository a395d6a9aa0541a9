const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const search = document.querySelector("input[type=search]");
const named = row => row.tensor.toLowerCase().includes(search.value.toLowerCase());
const ofKind = kind => data.rows.filter(row => kind.test(row.kind));
const parts = {forward: /^output$/, backward: /gradient/, weights: /^(weight|update)$/};
const percent = share => `${(100 * share).toPrecision(3)} %`;

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

// ---- heat maps of exponents

function values(row, exponent) {
  const share = row.bins[exponent - data.low];
  const lines = [`${row.tensor} (${row.operator || row.kind}, ${row.format})`];
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
  rows = rows.filter(named);
  if (document.querySelector("input:checked").value === "place")
    rows.sort((a, b) => a.place - b.place);
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
    context.fillStyle = row.bad ? red : row.format === "float32" ? grey : ink;
    const name = row.tensor.replace(/^gradient of /, "") + (row.kind === "update" ? ", added" : "");
    context.fillText(cut(context, name, left - 8), 0, y + each / 2);
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
  for (const at of data.edges) {
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
  showValues(element.parentNode, (across, down) => {
    const row = rows[Math.floor((down - top) / each)];
    return row ? values(row, Math.floor((across - left - extra) / cell) + data.low) : null;
  });
}

// ---- loss scales by step

function windows() {
  const points = data.windows.filter(Boolean), left = 46, bottom = 145, top = 10;
  if (!points.length) {
    for (const part of document.querySelectorAll(".fits")) part.hidden = true;
    return;
  }
  const [context, width] = canvas(document.getElementById("window"), 170);
  const powers = points.flatMap(p => [p[1], p[2]]).concat(data.scales);
  const least = Math.floor(Math.min(...powers)) - 1, most = Math.ceil(Math.max(...powers)) + 1;
  const steps = Math.max(data.windows.length, 1), wide = (width - left - 8) / steps;
  const y = v => bottom - (v - least) / (most - least) * (bottom - top);
  const grey = style("--grey"), blue = style("--float16"), red = style("--float8");
  context.strokeStyle = style("--line"); context.fillStyle = grey; context.textAlign = "right";
  const stride = Math.ceil((most - least) / 7);
  for (let v = least; v <= most; v += stride) {
    context.beginPath(); context.moveTo(left, y(v)); context.lineTo(width - 8, y(v));
    context.stroke();
    context.fillText("2^" + v, left - 5, y(v));
  }
  for (const [step, low, high] of points) {
    context.globalAlpha = 0.35; context.fillStyle = low <= high ? blue : red;
    context.fillRect(left + step * wide + 1, y(Math.max(low, high)), Math.max(wide - 2, 1),
                     Math.max(2, Math.abs(y(low) - y(high))));
    context.globalAlpha = 1;
  }
  context.strokeStyle = style("--float32"); context.lineWidth = 2; context.beginPath();
  data.scales.forEach((scale, i) => {
    context.lineTo(left + i * wide, y(scale)); context.lineTo(left + (i + 1) * wide, y(scale));
  });
  context.stroke();
  context.fillStyle = grey; context.textAlign = "center";
  const every = Math.max(1, Math.ceil(steps / Math.floor((width - left) / 40)));
  for (let i = 0; i < steps; i += every) context.fillText(i, left + (i + 0.5) * wide, bottom + 12);
}

function draw() {
  for (const [id, kind] of Object.entries(parts)) {
    const rows = ofKind(kind);
    document.getElementById(id).closest("details").hidden = !rows.length;
    if (rows.length) heat(id, rows);
  }
  windows();
}

for (const details of document.querySelectorAll("details")) {  // what is long is folded
  const element = details.querySelector("canvas");
  details.open = (element ? ofKind(parts[element.id]) : data.rows).length <= 60;
  details.addEventListener("toggle", draw);
}
for (const input of document.querySelectorAll("input")) input.addEventListener("input", draw);
for (const row of document.querySelectorAll(".tensors tbody tr"))
  search.addEventListener("input", () => { row.hidden = !named({tensor: row.cells[0].textContent}); });
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
