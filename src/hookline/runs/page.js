"use strict";
// ---------------------------------------------------------------- functions without a page (tested under node)

/** The running average without bias towards 0; null stays null. */
function smooth(values, weight) {
  if (!weight) return values;
  let average = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return average / total;
  });
}

/** Round numbers between low and high, about `count` of them. */
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  if (!(rough > 0) || !isFinite(rough)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0);  // not -0
  return ticks;
}

/** Powers of ten between low and high, with 2 and 5 times them if there are few. */
function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / Math.max(count, 1)));
  const factors = last - first <= 2 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = first; power <= last; power += every)
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push(value);
    }
  return ticks.length > 1 ? ticks : linearTicks(low, high, count);
}

/** A whole number as it is, others with five digits. */
function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (Number.isInteger(value) && size < 1e9) return String(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(5)));
}

/** Seconds as 45 s, 3:20 or 1:02:03. */
function formatTime(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

/** The index of the entry of an ascending list that is nearest to x. */
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

/** The value at x of the line through the points of two lists. */
function interpolate(xs, ys, x) {
  if (x <= xs[0]) return ys[0];
  const end = xs.length - 1;
  if (x >= xs[end]) return ys[end];
  let i = nearest(xs, x);
  if (xs[i] > x) i--;
  return ys[i] + ((ys[i + 1] - ys[i]) * (x - xs[i])) / (xs[i + 1] - xs[i]);
}

/** The indices to draw of the points with low <= x <= high and one more on each side: first, last, least and largest
 *  of each of `columns` columns, so that a curve looks the same as with all of its points. */
function thin(xs, ys, low, high, columns) {
  let start = 0, end = xs.length;
  while (start < end && xs[start] < low) start++;
  while (end > start && xs[end - 1] > high) end--;
  start = Math.max(0, start - 1);
  end = Math.min(xs.length, end + 1);
  if (end - start <= 4 * columns) return Array.from({ length: end - start }, (_, i) => start + i);
  const kept = [], width = (high - low) / columns || 1;
  for (let i = start; i < end;) {
    const column = Math.floor((xs[i] - low) / width);
    let least = i, largest = i, j = i;
    for (; j < end && Math.floor((xs[j] - low) / width) === column; j++) {
      if (ys[j] !== null && (ys[least] === null || ys[j] < ys[least])) least = j;
      if (ys[j] !== null && (ys[largest] === null || ys[j] > ys[largest])) largest = j;
    }
    kept.push(...[...new Set([i, least, largest, j - 1])].sort((a, b) => a - b));
    i = j;
  }
  return kept;
}

if (typeof module !== "undefined")
  module.exports = { smooth, linearTicks, logTicks, format, formatTime, nearest, interpolate, thin };

// ---------------------------------------------------------------- the page

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const make = (tag, attributes = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), attributes);
    node.append(...children);
    return node;
  };
  const many = data.runs.length > 1;
  const STYLES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
  const state = { axis: "iteration", smoothing: 0, log: false, range: null, off: new Set(), hidden: new Set() };
  const charts = [];

  const color = (series) => data.colors[(many ? series.run : series.place) % data.colors.length];
  const dash = (series) => (many ? STYLES[series.place % STYLES.length] : []);
  const visible = (series) => !state.off.has(series.run) && !state.hidden.has(series.metric) && along(series) !== null;
  const formatX = (x) => (state.axis === "time" ? formatTime(x) : format(x));

  /** The x values of a series on the current axis; null if its run does not have this axis. */
  function along(series) {
    if (state.axis === "iteration") return series.x;
    series.cache ??= {};
    if (series.cache[state.axis] === undefined) {
      const run = data.runs[series.run];
      let xs = null;
      if (state.axis === "epoch" && run.epoch_length)
        xs = series.x.map((i) => Math.min(i + 1, run.max_iter ?? Infinity) / run.epoch_length);
      if (state.axis === "time" && run.clock) xs = series.x.map((i) => interpolate(run.clock[0], run.clock[1], i));
      series.cache[state.axis] = xs;
    }
    return series.cache[state.axis];
  }

  /** The smoothed values of a series. */
  function values(series) {
    if (!state.smoothing) return series.y;
    if (series.smoothing !== state.smoothing) {
      series.smoothing = state.smoothing;
      series.smoothed = smooth(series.y, state.smoothing);
    }
    return series.smoothed;
  }

  /** The range of x: the zoomed one, or that of all visible series of all charts, so that charts line up. */
  function rangeX() {
    if (state.range) return state.range;
    let low = Infinity, high = -Infinity;
    for (const chart of charts)
      for (const series of chart.series.filter(visible)) {
        const xs = along(series);
        low = Math.min(low, xs[0]);
        high = Math.max(high, xs[xs.length - 1]);
      }
    if (state.axis !== "iteration" || low < high * 0.1) low = Math.min(low, 0);
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  class Chart {
    constructor({ title, series }) {
      this.title = title;
      this.series = series;
      this.canvas = make("canvas");
      this.overlay = make("canvas", { className: "overlay" });  // the pointer's marks
      this.legend = make("div", { className: "legend" });
      this.node = make("section", { className: "chart" }, make("h2", { textContent: title }), this.legend,
        make("div", { className: "plot" }, this.canvas, this.overlay));
      this.node.dataset.title = title;
      find("charts").append(this.node);
      this.addLegend();
      this.overlay.addEventListener("pointermove", (event) => this.move(event));
      this.overlay.addEventListener("pointerleave", () => this.leave());
      this.overlay.addEventListener("pointerdown", (event) => this.press(event));
      this.overlay.addEventListener("pointerup", (event) => this.release(event));
      this.overlay.addEventListener("dblclick", () => zoom(null));
      new ResizeObserver(() => this.refresh()).observe(this.canvas);
      new IntersectionObserver((entries) => {
        this.onScreen = entries.at(-1).isIntersecting;
        if (this.stale) this.refresh();
      }, { rootMargin: "200px" }).observe(this.node);
    }

    /** Draw now, or when the chart is scrolled into view. */
    refresh() {
      this.stale = !this.onScreen;
      if (this.onScreen) this.draw();
    }

    addLegend() {
      const metrics = [...new Set(this.series.map((one) => one.metric))];
      if (metrics.length < 2) return;
      for (const metric of metrics) {
        const series = this.series.find((one) => one.metric === metric);
        const mark = make("i");
        const kind = !many || !dash(series).length ? "solid" : series.place === 2 ? "dotted" : "dashed";
        mark.style.borderTop = `2px ${kind} ${many ? "currentColor" : color(series)}`;
        const button = make("button", { type: "button", title: "show or hide" }, mark, metric);
        button.setAttribute("aria-pressed", "true");
        button.onclick = () => {
          if (!state.hidden.delete(metric)) state.hidden.add(metric);
          button.setAttribute("aria-pressed", String(!state.hidden.has(metric)));
          drawAll();
        };
        this.legend.append(button);
      }
    }

    /** Draw everything; sets the scales that the pointer's position is read with. */
    draw() {
      const css = getComputedStyle(document.body), width = this.canvas.clientWidth, height = this.canvas.clientHeight;
      if (!width) return;
      const pen = clear(this.canvas);
      clear(this.overlay);
      pen.font = "11px system-ui, sans-serif";
      const shown = this.series.filter(visible), [x0, x1] = rangeX(), [y0, y1] = this.rangeY(shown, x0, x1);
      const ticks = (state.log ? logTicks : linearTicks)(y0, y1, 5);
      const labels = ticks.map(format);
      const left = 14 + Math.max(24, ...labels.map((text) => pen.measureText(text).width));
      const box = (this.box = { left, right: width - 12, top: 8, bottom: height - 24 });
      const up = state.log ? Math.log : (y) => y;
      this.toX = (x) => box.left + ((x - x0) / (x1 - x0)) * (box.right - box.left);
      this.fromX = (px) => x0 + ((px - box.left) / (box.right - box.left)) * (x1 - x0);
      this.toY = (y) => box.bottom - ((up(y) - up(y0)) / (up(y1) - up(y0))) * (box.bottom - box.top);

      pen.strokeStyle = css.getPropertyValue("--line");
      pen.fillStyle = css.getPropertyValue("--soft");
      pen.lineWidth = 1;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      ticks.forEach((tick, i) => {
        const y = Math.round(this.toY(tick)) + 0.5;
        line(pen, box.left, y, box.right, y);
        pen.fillText(labels[i], box.left - 6, y);
      });
      pen.textBaseline = "alphabetic";
      const xTicks = linearTicks(x0, x1, Math.max(2, Math.floor((box.right - box.left) / 65)));
      for (const tick of xTicks) {
        const x = this.toX(tick), text = formatX(tick), half = pen.measureText(text).width / 2;
        pen.textAlign = x + half > width ? "right" : "center";
        pen.fillText(text, pen.textAlign === "right" ? width - 1 : x, height - 7);
      }
      pen.save();
      pen.beginPath();
      pen.rect(box.left, box.top - 4, box.right - box.left + 2, box.bottom - box.top + 8);
      pen.clip();
      if (state.smoothing) for (const series of shown) this.curve(pen, series, series.y, x0, x1, 0.25);
      for (const series of shown) this.curve(pen, series, values(series), x0, x1, 1);
      pen.restore();
      if (!shown.length) {
        pen.textAlign = "center";
        pen.fillText("no data on this axis", (box.left + box.right) / 2, (box.top + box.bottom) / 2);
      }
    }

    rangeY(shown, x0, x1) {
      let low = Infinity, high = -Infinity;
      for (const series of shown) {
        const xs = along(series), ys = values(series);
        for (let i = 0; i < xs.length; i++) {
          if (xs[i] < x0 || xs[i] > x1 || ys[i] === null || (state.log && ys[i] <= 0)) continue;
          if (ys[i] < low) low = ys[i];
          if (ys[i] > high) high = ys[i];
        }
      }
      if (low > high) return state.log ? [0.1, 1] : [0, 1];
      if (state.log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
      const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
      return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
    }

    curve(pen, series, ys, x0, x1, alpha) {
      const xs = along(series), indices = thin(xs, ys, x0, x1, Math.ceil(this.box.right - this.box.left));
      pen.globalAlpha = alpha;
      pen.strokeStyle = pen.fillStyle = color(series);
      pen.lineWidth = alpha < 1 ? 1 : 1.6;
      pen.lineJoin = "round";
      pen.setLineDash(dash(series));
      pen.beginPath();
      let length = 0;
      const end = (x, y) => {
        if (length === 1) { pen.moveTo(x + 2, y); pen.arc(x, y, 2, 0, 7); }  // a point without neighbours
        length = 0;
      };
      let x = 0, y = 0;
      for (const i of indices) {
        if (ys[i] === null || (state.log && ys[i] <= 0)) { end(x, y); continue; }
        x = this.toX(xs[i]);
        y = this.toY(ys[i]);
        if (length++) pen.lineTo(x, y); else pen.moveTo(x, y);
      }
      end(x, y);
      pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
    }

    position(event) {
      const edge = this.overlay.getBoundingClientRect();
      return Math.min(Math.max(event.clientX - edge.left, this.box.left), this.box.right);
    }

    move(event) {
      const pen = clear(this.overlay), css = getComputedStyle(document.body), px = this.position(event), box = this.box;
      if (this.pressed !== undefined) {
        pen.fillStyle = css.getPropertyValue("--select");
        pen.fillRect(Math.min(this.pressed, px), box.top, Math.abs(px - this.pressed), box.bottom - box.top);
      }
      const x = this.fromX(px), rows = [];
      let at = null;
      for (const series of this.series.filter(visible)) {
        const xs = along(series), i = nearest(xs, x), ys = values(series);
        rows.push({ series, x: xs[i], value: ys[i], raw: series.y[i] });
        if (at === null || Math.abs(xs[i] - x) < Math.abs(at - x)) at = xs[i];
      }
      if (at === null) return this.leave();
      pen.strokeStyle = css.getPropertyValue("--soft");
      pen.lineWidth = 1;
      line(pen, Math.round(this.toX(at)) + 0.5, box.top, Math.round(this.toX(at)) + 0.5, box.bottom);
      for (const row of rows) {
        if (row.value === null || (state.log && row.value <= 0)) continue;
        const y = this.toY(row.value), dot = this.toX(row.x);
        if (dot < box.left - 1 || dot > box.right + 1) continue;
        pen.fillStyle = color(row.series);
        pen.beginPath();
        pen.arc(dot, y, 3.5, 0, 7);
        pen.fill();
      }
      showTip(event, at, rows);
    }

    press(event) {
      if (event.button !== 0) return;
      this.pressed = this.position(event);
      this.overlay.setPointerCapture(event.pointerId);
    }

    release(event) {
      const from = this.pressed, to = this.position(event);
      this.pressed = undefined;
      if (from === undefined || Math.abs(to - from) < 5) return;
      zoom([this.fromX(Math.min(from, to)), this.fromX(Math.max(from, to))]);
    }

    leave() {
      if (this.pressed !== undefined) return;
      clear(this.overlay);
      find("tip").hidden = true;
    }
  }

  /** Empty a canvas, with as many pixels as the screen has for it; return its context. */
  function clear(canvas) {
    const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(canvas.clientHeight * ratio);
    pen.scale(ratio, ratio);
    return pen;
  }

  function line(pen, x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  function showTip(event, at, rows) {
    const tip = find("tip"), most = 16;
    const head = make("b", { textContent: `${state.axis} ${formatX(at)}` });
    const listed = rows.filter((row) => row.value !== null).sort((a, b) => b.value - a.value);
    const metrics = new Set(listed.map((row) => row.series.metric));
    const table = make("table");
    for (const row of listed.slice(0, most)) {
      const dot = make("span", { className: "dot" });
      dot.style.background = color(row.series);
      const run = data.runs[row.series.run].name;
      const name = !many ? row.series.metric : metrics.size > 1 ? `${run} · ${row.series.metric}` : run;
      const raw = state.smoothing ? `(${format(row.raw)})` : "";
      const away = row.x !== at ? `at ${formatX(row.x)}` : "";
      table.append(make("tr", {}, make("td", {}, dot, name), make("td", { textContent: format(row.value) }),
        make("td", { textContent: `${raw} ${away}`.trim() })));
    }
    if (listed.length > most) table.append(make("tr", {}, make("td", { textContent: `${listed.length - most} more` })));
    tip.replaceChildren(head, table);
    tip.hidden = false;
    const space = 14, { width, height } = tip.getBoundingClientRect();
    const right = event.clientX + space + width < window.innerWidth;
    tip.style.left = `${Math.max(4, right ? event.clientX + space : event.clientX - space - width)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + space, window.innerHeight - height - 4))}px`;
  }

  function zoom(range) {
    state.range = range;
    find("reset").hidden = range === null;
    find("tip").hidden = true;
    drawAll();
  }

  let waiting = false;
  function drawAll() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      charts.forEach((chart) => chart.refresh());
    });
  }

  function addRuns() {
    if (!many) return;
    data.runs.forEach((run, i) => {
      const box = make("input", { type: "checkbox", checked: true });
      box.style.accentColor = data.colors[i % data.colors.length];
      box.onchange = () => {
        if (box.checked) state.off.delete(i); else state.off.add(i);
        drawAll();
      };
      find("runs").append(make("label", { title: run.path }, box, run.name));
    });
    const all = make("button", { type: "button", textContent: "all / none" });
    all.onclick = () => {
      const boxes = [...find("runs").querySelectorAll("input")], on = boxes.some((box) => !box.checked);
      boxes.forEach((box) => { if (box.checked !== on) box.click(); });
    };
    find("runs").append(all);
  }

  function addControls() {
    for (const axis of data.axes) {
      const box = make("input", { type: "radio", name: "axis", value: axis, checked: axis === data.axis });
      box.onchange = () => { state.axis = axis; zoom(null); };
      find("axes").append(make("label", {}, box, make("span", { textContent: axis })));
    }
    state.axis = data.axis;
    const slider = find("smoothing"), show = () => {
      state.smoothing = Number(slider.value);
      find("weight").textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
      drawAll();
    };
    slider.value = data.smoothing;
    slider.oninput = show;
    show();
    find("log").checked = state.log = data.log;
    find("log").onchange = (event) => { state.log = event.target.checked; drawAll(); };
    find("reset").onclick = () => zoom(null);
    find("filter").oninput = (event) => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const chart of charts) {
        const names = [chart.title, ...chart.series.map((one) => one.metric)].join(" ").toLowerCase();
        chart.node.hidden = !words.every((word) => names.includes(word));
      }
    };
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") zoom(null); });
    window.addEventListener("beforeprint", () => charts.forEach((chart) => chart.draw()));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  }

  function addTable() {
    if (!data.table) return;
    const { columns, titles, rows, keys } = data.table;
    const body = make("tbody"), heads = columns.map((name, i) => {
      const head = make("th", { textContent: titles[i], title: name, tabIndex: 0 });
      if (i > keys) head.className = "number";
      const sort = () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b));
        rows.sort((a, b) => (a[i] === null) - (b[i] === null) || (up ? 1 : -1) * order(a[i], b[i]));
        fill();
      };
      head.onclick = sort;
      head.onkeydown = (event) => { if (event.key === "Enter") sort(); };
      return head;
    });
    const fill = () => body.replaceChildren(...rows.map((row) => make("tr", {}, ...row.map((value, i) => {
      const number = typeof value === "number";
      const cell = make("td", { textContent: value === null ? "" : number ? format(value) : String(value) });
      if (i > keys) cell.className = "number";
      if (i === 0) {
        const dot = make("span", { className: "dot" });
        dot.style.background = data.colors[data.runs.findIndex((run) => run.name === value) % data.colors.length];
        cell.prepend(dot);
      }
      return cell;
    }))));
    fill();
    find("table").append(make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body));
    find("comparison").hidden = false;
  }

  for (const chart of data.charts) for (const series of chart.series) series.x = data.x[series.x];
  addRuns();
  data.charts.forEach((chart) => charts.push(new Chart(chart)));
  addControls();
  addTable();
  document.body.dataset.ready = "true";
}

if (typeof document !== "undefined") start();
