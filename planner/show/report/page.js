// The behaviour of the report page. It runs once the figures stand, with the figures and their data as arguments.
const d = data;
const by_id = (id) => document.getElementById(id);
const range = memory.x_range;
const moments = d.totals.length, groups = d.groups.length, lives = d.group.length;
const span = range.end;
const firsts = new Int32Array(groups + 1).fill(lives);  // of each group, its first life
for (let i = lives - 1; i >= 0; i--) firsts[d.group[i]] = i;
for (let g = groups - 1; g >= 0; g--) firsts[g] = Math.min(firsts[g], firsts[g + 1]);

const number = (value) => value.toLocaleString("en", {maximumFractionDigits: 2, minimumFractionDigits: value < 100 ? 2 : 0});
const bytes_text = (size) => {
  for (const [scale, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (size >= scale) return `${(size / scale).toFixed(2)} ${unit}`;
  return `${size} B`;
};
const time_text = (x) => `${Number(x.toPrecision(4))} ${d.time_unit}`;

/** The first index of sorted `values` in [low, high) whose value is at least `wanted`. */
function lower(values, wanted, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

// What is in view: for each column the moment in it that holds most, and the stack of groups there.
let view;

function look(from, to) {
  const bins = d.bins, at = new Int32Array(bins).fill(-1), width = (to - from) / bins;
  let first = Math.max(0, lower(d.starts, from, 0, moments) - 1);
  for (let m = first; m < moments && d.starts[m] <= to; m++) {
    const left = Math.max(0, Math.floor((d.starts[m] - from) / width));
    const end = Math.min(bins - 1, Math.max(left, Math.ceil((d.starts[m + 1] - from) / width) - 1));
    for (let b = left; b <= end; b++) if (at[b] < 0 || d.totals[m] > d.totals[at[b]]) at[b] = m;
  }
  for (let b = 0; b < bins; b++) if (at[b] < 0) at[b] = b ? at[b - 1] : first;
  const tops = [new Float64Array(bins).fill(d.static)];
  for (let g = 0; g < groups; g++) {
    const sums = added(at, firsts[g], firsts[g + 1]);
    const below = tops[g];
    for (let b = 0; b < bins; b++) sums[b] += below[b];
    tops.push(sums);
  }
  tops.push(Float64Array.from(at, (m) => d.totals[m]));
  return {from, to, width, at, tops};
}

/** For each column the sizes of the lives from `low` to `high`, in units of the axis. */
function added(at, low, high) {
  const sums = new Float64Array(at.length + 1);
  for (let i = low; i < high; i++) {
    const begin = lower(at, d.born[i], 0, at.length), end = lower(at, d.dies[i], begin, at.length);
    if (begin < end) {
      sums[begin] += d.bytes[i] / d.size_scale;
      sums[end] -= d.bytes[i] / d.size_scale;
    }
  }
  for (let b = 1; b < sums.length; b++) sums[b] += sums[b - 1];
  return sums.subarray(0, at.length);
}

function draw() {
  view = look(range.start, range.end);
  const bins = d.bins, x = new Float64Array(bins + 1);
  for (let b = 0; b <= bins; b++) x[b] = view.from + b * view.width;
  const columns = {x, y0: new Float64Array(bins + 1)};
  view.tops.forEach((top, i) => {
    const column = new Float64Array(bins + 1);
    column.set(top);
    column[bins] = top[bins - 1];
    columns[`y${i + 1}`] = column;
  });
  bands.data = columns;
  by_id("shown").textContent = range.start <= 0 && range.end >= span ? "the whole step" : `${time_text(range.start)} to ${time_text(range.end)}`;
  mark(marked);
}

let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function zoom(from, to) {
  const least = Math.min(span, span / moments);
  let width = Math.max(least, Math.min(span, to - from));
  let start = Math.max(0, Math.min(span - width, (from + to - width) / 2));
  range.setv({start, end: start + width});
}

// Marks: the outlines of some tensors.
let marked = [];
const MOST_MARKED = 150;

function outline(i) {
  const {at, tops, width, from} = view, g = d.group[i];
  const begin = lower(at, d.born[i], 0, at.length), end = lower(at, d.dies[i], begin, at.length);
  if (begin >= end) return null;
  const below = added(at, firsts[g], i), height = d.bytes[i] / d.size_scale, xs = [], ys = [];
  for (let b = begin; b < end; b++) {
    const y = tops[g][b] + below[b];
    xs.push(from + b * width, from + (b + 1) * width);
    ys.push(y, y);
  }
  for (let k = xs.length - 1; k >= 0; k--) { xs.push(xs[k]); ys.push(ys[k] + height); }
  return [xs, ys];
}

function mark(which) {
  marked = which;
  const outlines = which.slice(0, MOST_MARKED).map(outline).filter((one) => one !== null);
  marks.data = {xs: outlines.map((one) => one[0]), ys: outlines.map((one) => one[1])};
}

// Under the pointer.
const tip = by_id("tip");
const SLACK = 6;  // pixels beside what is pointed at

function life_at(x, y) {
  const column = Math.floor((x - view.from) / view.width);
  if (column < 0 || column >= d.bins || y < 0) return null;
  const now = view.at[column];
  if (y < d.static) return {what: "static"};
  for (let g = 0; g < groups; g++) {
    if (y >= view.tops[g + 1][column]) continue;
    let top = view.tops[g][column];
    for (let i = firsts[g]; i < firsts[g + 1]; i++) {
      if (d.born[i] > now || d.dies[i] <= now) continue;
      top += d.bytes[i] / d.size_scale;
      if (y < top) return {what: "life", life: i};
    }
  }
  return y < d.totals[now] ? {what: "workspace", moment: now} : null;
}

const text = (index) => d.texts[index];

function life_lines(i) {
  const lines = [[text(d.name[i]), "title"], [`${bytes_text(d.bytes[i])}, ${text(d.shape[i])}`]];
  lines.push([`module ${text(d.module[i]) || "unknown"}`]);
  lines.push([`from ${text(d.producer[i])}${d.again[i] ? " (recomputed)" : ""} to ${d.reader[i] ? text(d.reader[i]) : "no reader"}`]);
  lines.push([`${time_text(d.starts[d.born[i]])} to ${time_text(d.starts[d.dies[i]])}`]);
  return lines;
}

function show_tip(plot, event, lines) {
  tip.replaceChildren(...lines.map(([line, kind]) => {
    const element = document.createElement("div");
    element.textContent = line;
    if (kind) element.className = kind;
    return element;
  }));
  tip.hidden = false;
  const box = by_id(plot.name).getBoundingClientRect();
  const x = box.left + event.sx, y = box.top + event.sy;
  const left = x + 16 + tip.offsetWidth < document.documentElement.clientWidth ? x + 16 : Math.max(4, x - 16 - tip.offsetWidth);
  tip.style.left = `${Math.min(left, document.documentElement.clientWidth - tip.offsetWidth - 4)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 16, document.documentElement.clientHeight - tip.offsetHeight - 4))}px`;
}

let found = [];  // by the search
function hide_tip() {
  tip.hidden = true;
  reader.visible = false;
  if (marked !== found) mark(found);
}

function over_memory(event) {
  const here = life_at(event.x, event.y);
  reader.visible = false;
  if (here === null) return hide_tip();
  const now = view.at[Math.floor((event.x - view.from) / view.width)];
  if (here.what === "life") {
    mark([here.life]);
    show_tip(memory, event, life_lines(here.life));
  } else {
    mark(found);
    const size = here.what === "static" ? d.static : d.totals[now] - view.tops[groups][Math.floor((event.x - view.from) / view.width)];
    const title = here.what === "static" ? "static memory" : `workspace of ${text(d.ops[now])}`;
    show_tip(memory, event, [[title, "title"], [bytes_text(size * d.size_scale)]]);
  }
}

function over_lanes(event) {
  const lane = Math.round(event.y), slack = SLACK * (range.end - range.start) / Math.max(1, lanes.inner_width);
  let best = -1, nearest = slack;
  for (let k = 0; k < d.bar_lane.length; k++) {
    if (d.bar_lane[k] !== lane) continue;
    const away = Math.max(0, d.bar_left[k] - event.x, event.x - d.bar_right[k]);
    if (away < nearest || (away === 0 && nearest > 0)) { nearest = away; best = k; }
  }
  if (best < 0) return hide_tip();
  mark(d.bar_lives[best]);
  reader.visible = d.bar_reader[best] >= 0;
  if (reader.visible) reader.location = d.bar_reader[best];
  const lines = [[text(d.bar_title[best]), "title"], [text(d.bar_said[best])], [text(d.bar_purpose[best])]];
  show_tip(lanes, event, lines.filter(([line]) => line));
}

/** Over tensors at their addresses, and points of the curve. */
function over_boxes(plot, sources, event) {
  const wide = SLACK * (plot.x_range.end - plot.x_range.start) / Math.max(1, plot.inner_width);
  const high = SLACK * (plot.y_range.end - plot.y_range.start) / Math.max(1, plot.inner_height);
  let lines = null, nearest = 1;
  for (const {data: {left, right, bottom, top, title, said}} of sources) {
    for (let i = 0; i < title.length; i++) {
      const away = Math.max((left[i] - event.x) / wide, (event.x - right[i]) / wide, (bottom[i] - event.y) / high, (event.y - top[i]) / high);
      if (away < nearest) { nearest = away; lines = [[title[i], "title"], [said[i]]]; }
    }
  }
  if (lines === null) return hide_tip();
  show_tip(plot, event, lines);
}

// Search.
const LISTED = 30;

function search(wanted) {
  const needle = wanted.trim().toLowerCase(), list = by_id("found");
  found = [];
  if (needle) {
    const hit = d.texts.map((one) => one.toLowerCase().includes(needle));
    for (let i = 0; i < lives; i++) if (hit[d.name[i]] || hit[d.module[i]] || hit[d.producer[i]]) found.push(i);
    found.sort((a, b) => d.bytes[b] - d.bytes[a]);
  }
  list.replaceChildren(...found.slice(0, LISTED).map((i) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.textContent = `${text(d.name[i])}, ${bytes_text(d.bytes[i])}, ${time_text(d.starts[d.born[i]])} to ${time_text(d.starts[d.dies[i]])}${d.again[i] ? ", recomputed" : ""}`;
    button.addEventListener("click", () => {
      const from = d.starts[d.born[i]], to = d.starts[d.dies[i]], room = Math.max(0.15 * (to - from), span / moments);
      zoom(from - room, to + room);
      mark([i]);
    });
    item.append(button);
    return item;
  }));
  by_id("hits").textContent = !needle ? "" : found.length
    ? `${found.length.toLocaleString("en")} tensors, the largest first${found.length > LISTED ? ` (${LISTED} listed)` : ""}`
    : "nothing has this name";
  mark(found);
}

by_id("find").addEventListener("input", (event) => search(event.target.value));
for (const button of document.querySelectorAll("[data-group]")) {
  button.addEventListener("click", () => {
    const g = Number(button.dataset.group), on = button.getAttribute("aria-pressed") !== "true";
    for (const other of document.querySelectorAll("[data-group]")) other.setAttribute("aria-pressed", String(on && other === button));
    for (let i = 0; i < groups; i++) memory.select_one(`band${i + 1}`).glyph.fill_alpha = !on || i === g ? 1 : 0.15;
  });
}

// Zoom.
const middle = () => (range.start + range.end) / 2, half = () => (range.end - range.start) / 2;
by_id("zoom-in").addEventListener("click", () => zoom(middle() - half() / 2, middle() + half() / 2));
by_id("zoom-out").addEventListener("click", () => zoom(middle() - 2 * half(), middle() + 2 * half()));
by_id("earlier").addEventListener("click", () => zoom(range.start - half(), range.end - half()));
by_id("later").addEventListener("click", () => zoom(range.start + half(), range.end + half()));
by_id("zoom-all").addEventListener("click", () => zoom(0, span));
for (const property of ["start", "end"]) range.properties[property].change.connect(redraw);

const hits = boxes.map(([plot, sources]) => [plot, (event) => over_boxes(plot, sources, event)]);
for (const [plot, over] of [[memory, over_memory], [lanes, over_lanes], ...hits]) {
  if (plot === null) continue;
  plot.on_event("mousemove", over);
  plot.on_event("tap", over);
  // A finger that is lifted leaves too: its tip stays until the next tap.
  by_id(plot.name).addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide_tip(); });
  if (plot.x_range === range) plot.on_event("doubletap", () => zoom(0, span));
}
document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".plot")) hide_tip(); });
document.addEventListener("scroll", () => { if (!tip.hidden) hide_tip(); }, {passive: true});

// Fingers scroll the page; zooming is for the buttons there.
if (matchMedia("(pointer: coarse)").matches) {
  for (const plot of memory.document.roots()) plot.toolbar.active_drag = null;
}

// Colours, also when the reader changes between light and dark.
function paint() {
  const style = getComputedStyle(document.documentElement);
  for (const model of themed) {
    for (const [property, name] of Object.entries(model.tags[0])) model[property] = style.getPropertyValue(`--${name}`).trim();
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
draw();
document.documentElement.dataset.ready = "yes";
