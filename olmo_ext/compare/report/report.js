// Draws the plots from the data in the page, and lets a reader sort, hide and restyle. Everything it shows stands in
// the tables as well, which the page carries as plain HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const hidden = new Set();                       // names of runs
  const drawn = new Set();                        // ids of plots that have been on screen
  const runsOf = data.groups.map((_, g) => data.runs.filter((run) => run.g === g));
  // Okabe and Ito's colours without the yellow, lightened for a dark ground; the baseline is ink.
  const PALETTE = {
    light: ["#0072b2", "#d55e00", "#009e73", "#b8578f", "#c98500", "#3a9bd1", "#7a5195", "#6b6b00"],
    dark: ["#4ba3db", "#f0803c", "#2fbf95", "#e08fc0", "#f2b632", "#8fd0f5", "#b295d6", "#c6c656"],
  };
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star", "x"];

  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const narrow = () => document.documentElement.clientWidth < 700;
  const tint = (hex, alpha) => {
    const n = parseInt(hex.slice(1), 16);
    return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${alpha})`;
  };

  // The place of a group among the named ones decides its colour, so that hiding a run recolours nothing.
  const rank = [];
  { let next = 0; data.groups.forEach((group, g) => { rank[g] = group.base || !group.strong ? -1 : next++; }); }
  const bases = data.groups.map((group, g) => (group.base ? g : -1)).filter((g) => g >= 0);
  function look(g) {
    const group = data.groups[g], colours = PALETTE[dark() ? "dark" : "light"];
    if (group.base) return { colour: css("--ink"), dash: DASHES[bases.indexOf(g) % 4], symbol: "circle", width: 2.2 };
    if (!group.strong) return { colour: css("--faint"), dash: "solid", symbol: "circle", width: 1 };
    const r = rank[g];
    return { colour: colours[r % colours.length], dash: DASHES[Math.floor(r / colours.length) % 4], symbol: SYMBOLS[r % SYMBOLS.length], width: 2 };
  }

  const SI = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]];
  const short = (v) => { for (const [size, unit] of SI) if (Math.abs(v) >= size) return `${+(v / size).toPrecision(3)}${unit}`; return `${+v.toPrecision(3)}`; };
  const minus = (text) => text.replace("-", "\u2212");

  function layout(element, x, y, more) {
    const ink = css("--ink"), soft = css("--soft"), hair = css("--hair");
    const font = { family: css("--sans"), size: 13, color: soft };
    const axis = { color: soft, tickfont: { size: 12.5, color: soft }, linecolor: css("--rule"), zeroline: false, ticks: "outside", ticklen: 4, tickcolor: css("--rule"), automargin: true };
    return {
      width: element.clientWidth, height: element.clientHeight, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font,
      margin: { l: 58, r: more.right ?? 16, t: 14, b: 48 }, showlegend: false, hovermode: "closest", dragmode: "zoom",
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--rule"), font: { family: css("--sans"), size: 13, color: ink }, align: "left" },
      xaxis: { ...axis, showline: true, showgrid: false, title: { text: x, font: { size: 13, color: soft }, standoff: 10 }, ...(more.xaxis || {}) },
      yaxis: { ...axis, showgrid: true, gridcolor: hair, ticks: "", title: { text: y, font: { size: 13, color: soft }, standoff: 8 }, ...(more.yaxis || {}) },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: ink }, annotations: more.annotations || [], shapes: more.shapes || [],
    };
  }
  const config = (name) => ({
    displaylogo: false, responsive: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtons: [["toImage", "resetScale2d"]],
    toImageButtonOptions: { format: "svg", filename: name }, displayModeBar: "hover",
  });
  function show(id, traces, frame) {
    const element = document.getElementById(`plot-${id}`);
    Plotly.react(element, traces, frame, config(id));
    element.dataset.traces = traces.length;
  }

  // ---- curves -------------------------------------------------------------------------------------------------
  const option = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;
  const axisOf = (run, curve, axis) => axis === "s" ? curve.s : axis === "f" ? curve.t.map((t) => t * run.k) : curve.t;

  function at(xs, ys, x) {                        // linear interpolation; null outside the curve
    if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    if (ys[low] === null || ys[high] === null) return null;
    const span = xs[high] - xs[low];
    return span > 0 ? ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / span : ys[high];
  }
  function smooth(ys, span) {                     // exponential average over points, started at the first one
    let last = null;
    return ys.map((y) => { if (y === null) return null; last = last === null ? y : last + (y - last) * 2 / (span + 1); return last; });
  }
  function band(curves) {                         // mean, lowest, highest over seeds on the union of their points
    const grid = [...new Set(curves.flatMap((c) => c.x))].sort((a, b) => a - b);
    const step = Math.max(1, Math.floor(grid.length / 260));
    const out = { x: [], mean: [], low: [], high: [] };
    grid.forEach((x, index) => {
      if (index % step && index !== grid.length - 1) return;
      const values = curves.map((c) => at(c.x, c.y, x)).filter((v) => v !== null);
      if (values.length < curves.length) return;  // where a seed is missing the mean would jump
      out.x.push(x); out.mean.push(values.reduce((a, b) => a + b, 0) / values.length);
      out.low.push(Math.min(...values)); out.high.push(Math.max(...values));
    });
    return out;
  }

  function curvesOf(g, finished, axis, kind, level, difference) {
    const key = kind === "v" ? "v" : level === "0" ? "r" : "m";
    const spans = { 0: 1, 1: 3, 2: 15 };
    const read = (run) => {
      const curve = run[key]; if (!curve) return null;
      return { name: run.n, s: run.s, x: axisOf(run, curve, axis), y: kind === "v" ? curve.y : smooth(curve.y, spans[level]) };
    };
    let curves = runsOf[g].filter((run) => run.done === finished && !hidden.has(run.n)).map(read).filter(Boolean);
    if (difference) {
      const home = data.groups[g].base ? g : data.groups[g].of;
      const others = new Map(runsOf[home].map((run) => [run.s, read(run)]));
      curves = curves.map((curve) => {
        const other = others.get(curve.s); if (!other) return null;
        const kept = curve.x.map((x, i) => [x, curve.y[i], at(other.x, other.y, x)]).filter((p) => p[1] !== null && p[2] !== null);
        return { ...curve, x: kept.map((p) => p[0]), y: kept.map((p) => p[1] - p[2]) };
      }).filter((curve) => curve && curve.x.length);
    }
    return curves;
  }

  function drawCurves() {
    const element = document.getElementById("plot-curves");
    const axis = option("curve-x"), kind = option("curve-y"), level = option("curve-smooth");
    const difference = option("curve-show") === "difference", log = document.getElementById("curve-log").checked;
    document.querySelectorAll('input[name="curve-smooth"]').forEach((input) => { input.disabled = kind === "v"; });
    document.querySelector('input[name="curve-smooth"]').closest("fieldset").style.opacity = kind === "v" ? .4 : 1;
    const traces = [], ends = [], tops = [], lows = [];
    const order = data.groups.map((_, g) => g).sort((a, b) => (data.groups[a].strong - data.groups[b].strong) || (data.groups[b].base - data.groups[a].base));
    for (const g of order) {
      const style = look(g), name = data.groups[g].n;
      for (const finished of [true, false]) {
        const curves = curvesOf(g, finished, axis, kind, level, difference);
        if (!curves.length) continue;
        const raw = kind === "t" && level === "0";
        if (raw || !finished) {
          curves.forEach((curve) => traces.push({ x: curve.x, y: curve.y, mode: "lines", name: curve.name, line: { color: style.colour, width: raw ? 1 : 1.5, dash: finished ? "solid" : "dot" }, opacity: raw ? .75 : 1, hovertemplate: `${curve.name}<br>%{y:.4f}<extra></extra>` }));
        }
        const all = band(curves); if (!all.x.length) continue;
        if (finished && !raw) {
          if (curves.length > 1 && data.groups[g].strong) {
            const fill = style.colour.startsWith("#") ? tint(style.colour, .15) : "rgba(128,128,128,.15)";
            traces.push({ x: all.x.concat(all.x.slice().reverse()), y: all.high.concat(all.low.slice().reverse()), fill: "toself", fillcolor: fill, mode: "none", hoverinfo: "skip", name: `${name} seeds` });
          }
          traces.push({ x: all.x, y: all.mean, mode: all.x.length < 30 ? "lines+markers" : "lines", marker: { size: 4, color: style.colour }, name, line: { color: style.colour, width: style.width, dash: style.dash }, hovertemplate: `<b>${name}</b>, ${curves.length} seed${curves.length > 1 ? "s" : ""}<br>%{y:.4f}<extra></extra>` });
        }
        const cut = all.x[all.x.length - 1] * .12, from = all.x.findIndex((x) => x >= cut);
        const tail = [all.low, all.high].flatMap((values) => values.slice(Math.max(0, from)));
        tops.push(Math.max(...tail)); lows.push(Math.min(...tail));
        if (finished && data.groups[g].strong) ends.push({ g, y: all.mean[all.mean.length - 1], text: name, colour: style.colour });
      }
    }
    let low = Math.min(...lows), high = Math.max(...tops);
    if (!lows.length) [low, high] = [0, 1];
    const pad = (high - low || .1) * .06, range = [low - pad, high + pad];
    const names = { t: "Tokens", f: "Training FLOPs", s: "Training seconds" };
    const right = narrow() ? 10 : labelRoom(ends);
    const annotations = narrow() ? [] : stack(ends, range, element.clientHeight - 62);
    keys(element, ends);
    show("curves", traces, layout(element, names[axis], difference ? "Difference in loss (nats)" : kind === "v" ? "Validation loss (nats)" : "Training loss (nats)", {
      right, annotations, xaxis: { type: log ? "log" : "linear", ...(log ? { dtick: 1 } : { rangemode: "tozero" }), exponentformat: axis === "f" ? "power" : "SI" },
      yaxis: { range }, shapes: difference ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: css("--faint"), width: 1 } }] : [],
    }));
  }
  const labelRoom = (ends) => 20 + Math.min(230, Math.max(0, ...ends.map((end) => Math.min(end.text.length, 30) * 7.1)));
  const clip = (text) => text.length > 30 ? `${text.slice(0, 29)}…` : text;
  // Labels at the ends of lines, moved apart so that they do not overlap.
  function stack(ends, range, height) {
    const gap = 17, size = height / (range[1] - range[0]);
    const places = ends.map((end) => ({ ...end, p: (range[1] - end.y) * size })).sort((a, b) => a.p - b.p);
    for (let round = 0; round < 60; round++) {
      for (let i = 1; i < places.length; i++) {
        const overlap = gap - (places[i].p - places[i - 1].p);
        if (overlap > 0) { places[i].p += overlap / 2; places[i - 1].p -= overlap / 2; }
      }
      places.forEach((place) => { place.p = Math.min(height - 4, Math.max(4, place.p)); });
    }
    return places.map((place) => ({ x: 1, xref: "paper", xanchor: "left", xshift: 8, y: range[1] - place.p / size, yanchor: "middle", text: clip(place.text), showarrow: false, font: { size: 13, color: place.colour } }));
  }
  function keys(element, ends) {
    let box = element.previousElementSibling;
    if (!box || !box.classList.contains("keys")) {
      box = document.createElement("div"); box.className = "keys"; box.setAttribute("aria-hidden", "true"); element.before(box);
    }
    box.replaceChildren(...(narrow() ? ends : []).map((end) => {
      const item = document.createElement("span"), swatch = document.createElement("i");
      swatch.className = "swatch"; swatch.style.borderColor = end.colour; item.append(swatch, clip(end.text)); return item;
    }));
  }

  // ---- figures of points --------------------------------------------------------------------------------------
  function drawPoints(figure) {
    const element = document.getElementById(`plot-${figure.id}`);
    const points = figure.points.filter((point) => !hidden.has(point.r));
    const means = [];
    data.groups.forEach((group, g) => {
      const own = points.filter((point) => point.g === g); if (!own.length) return;
      means.push({ g, n: own.length, x: own.reduce((a, p) => a + p.x, 0) / own.length, y: own.reduce((a, p) => a + p.y, 0) / own.length });
    });
    const traces = [], xs = points.map((p) => p.x), ys = points.map((p) => p.y), ends = [];
    // Where groups form lines (a family, a shape over its learning rates) the line carries colour and name.
    const lines = (figure.lines || figure.fits || []).filter((line) => figure.points.some((point) => line.g.includes(point.g))), worn = new Map();
    lines.forEach((line, number) => {
      const home = line.g.some((g) => data.groups[g].base), colours = PALETTE[dark() ? "dark" : "light"];
      const place = lines.slice(0, number).filter((other) => !other.g.some((g) => data.groups[g].base)).length;
      const colour = home ? css("--ink") : colours[place % colours.length], symbol = home ? "circle" : SYMBOLS[(place + 1) % SYMBOLS.length];
      line.g.forEach((g) => worn.set(g, { colour, symbol, width: 2 }));
      const on = means.filter((mean) => line.g.includes(mean.g)).sort((a, b) => a.x - b.x); if (!on.length) return;
      ends.push({ y: figure.fits ? line.y[line.y.length - 1] : on[on.length - 1].y, text: line.name, colour });
      if (figure.lines && on.length > 1) traces.push({ x: on.map((p) => p.x), y: on.map((p) => p.y), mode: "lines", line: { color: colour, width: 1.6 }, hoverinfo: "skip", name: line.name });
    });
    const wear = (g) => worn.get(g) || look(g);
    for (const fit of figure.fits || []) {
      if (!means.some((mean) => fit.g.includes(mean.g))) continue;
      const colour = worn.get(fit.g[0]).colour;
      if (fit.lo.length) {
        const fill = colour.startsWith("#") ? tint(colour, .14) : "rgba(128,128,128,.14)";
        traces.push({ x: fit.x.concat(fit.x.slice().reverse()), y: fit.hi.concat(fit.lo.slice().reverse()), fill: "toself", fillcolor: fill, mode: "none", hoverinfo: "skip", name: `${fit.name} band` });
      }
      traces.push({ x: fit.x, y: fit.y, mode: "lines", line: { color: colour, width: 1.6 }, hoverinfo: "skip", name: fit.name });
    }
    if (figure.front && means.length > 1) {
      const way = figure.front === "max" ? -1 : 1, sorted = means.slice().sort((a, b) => way * (a.x - b.x)), front = [];
      let best = Infinity;
      for (const mean of sorted) if (mean.y < best) { best = mean.y; front.push(mean); }
      traces.push({ x: front.map((p) => p.x), y: front.map((p) => p.y), mode: "lines", line: { color: css("--faint"), width: 1, shape: figure.front === "max" ? "vh" : "hv", dash: "dot" }, hoverinfo: "skip", name: "frontier" });
    }
    for (const mean of means) {
      const style = wear(mean.g), own = points.filter((point) => point.g === mean.g), name = data.groups[mean.g].n;
      if (own.length > 1) traces.push({ x: own.map((p) => p.x), y: own.map((p) => p.y), text: own.map((p) => p.r), mode: "markers", marker: { size: 5, color: style.colour, opacity: .38 }, hovertemplate: "%{text}<br>%{y:.4f}<extra></extra>", name: `${name} seeds` });
      traces.push({ x: [mean.x], y: [mean.y], mode: "markers", marker: { size: lines.length ? 9 : data.groups[mean.g].strong ? 11 : 7, color: style.colour, symbol: style.symbol }, hovertemplate: `<b>${name}</b>, ${mean.n} seed${mean.n > 1 ? "s" : ""}<br>${figure.x}: ${minus(short(mean.x))}<br>${figure.y}: %{y:.4f}<extra></extra>`, name });
    }
    const log = figure.log && Math.min(...xs) > 0, to = log ? Math.log10 : (x) => x;
    const span = (values, share) => { const low = Math.min(...values), high = Math.max(...values), pad = (high - low || Math.abs(high) * .02 || 1) * share; return [low - pad, high + pad]; };
    const xr = points.length ? span(xs.map(to), .12) : [0, 1], yr = points.length ? span(ys, .14) : [0, 1];
    const right = lines.length && !narrow() ? labelRoom(ends) : 18, width = element.clientWidth - 58 - right, height = element.clientHeight - 62;
    if (lines.length) keys(element, ends);
    const annotations = lines.length ? (narrow() ? [] : stack(ends, yr, height)) : place(means.filter((mean) => data.groups[mean.g].strong), (x) => (to(x) - xr[0]) / (xr[1] - xr[0]) * width, (y) => (yr[1] - y) / (yr[1] - yr[0]) * height, width, height, to);
    const tick = ticks(xr, log, figure.id === "pareto-flops" || figure.id === "learning-rate", width, figure.ticks);
    show(figure.id, traces, layout(element, figure.x, figure.y, { right, annotations, xaxis: { type: log ? "log" : "linear", range: xr, ...tick }, yaxis: { range: yr } }));
  }
  // Few, round ticks: plotly's own are crowded on a short logarithmic axis.
  function ticks(range, log, scientific, width, given) {
    const raise = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
    const write = (v) => {
      if (!scientific) return short(v);
      const [mantissa, exponent] = v.toExponential(1).split("e");
      const power = exponent.replace("+", "").replace("-", "\u207b").replace(/\d/g, (d) => raise[d]);
      return `${+mantissa}\u00d710${power}`;
    };
    let values = [];
    const most = Math.max(2, Math.floor(width / 95));
    if (given && given.length <= most) values = given;
    else if (log) {
      const [low, high] = range.map((r) => 10 ** r);
      for (const mantissas of [[1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8], [1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
        values = [];
        for (let e = Math.floor(range[0]); e <= Math.ceil(range[1]); e++) for (const m of mantissas) { const v = m * 10 ** e; if (v >= low && v <= high) values.push(v); }
        if (values.length <= most) break;
      }
    } else {
      const raw = (range[1] - range[0]) / most, unit = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 2.5, 5, 10].map((m) => m * unit).find((s) => s >= raw);
      for (let v = Math.ceil(range[0] / step) * step; v <= range[1]; v += step) values.push(+v.toPrecision(12));
    }
    let texts = values.map(write);
    if (new Set(texts).size < texts.length) texts = values.map((v) => v.toLocaleString("en"));  // closer than three digits
    return { tickmode: "array", tickvals: values, ticktext: texts };
  }
  // Names beside their points, on the first free side; a name without room is left to the pointer.
  function place(means, px, py, width, height, to) {
    const boxes = means.map((mean) => ({ l: px(mean.x) - 7, r: px(mean.x) + 7, t: py(mean.y) - 7, b: py(mean.y) + 7 })), out = [];
    for (const mean of means) {
      const text = clip(data.groups[mean.g].n), w = text.length * 6.9, x = px(mean.x), y = py(mean.y);
      const sides = [["left", x + 11, y, 11, 0], ["right", x - 11 - w, y, -11, 0], ["center", x - w / 2, y - 17, 0, 17], ["center", x - w / 2, y + 17, 0, -17], ["left", x + 8, y - 15, 8, 15], ["left", x + 8, y + 15, 8, -15], ["right", x - 8 - w, y - 15, -8, 15], ["right", x - 8 - w, y + 15, -8, -15]];
      for (const [anchor, left, middle, shiftX, shiftY] of sides) {
        const box = { l: left, r: left + w, t: middle - 8, b: middle + 8 };
        if (box.l < 0 || box.r > width + 14 || box.t < -6 || box.b > height + 4) continue;
        const own = { x, y };
        if (boxes.some((o) => o.l < box.r && o.r > box.l && o.t < box.b && o.b > box.t && !(o.l === own.x - 7 && o.t === own.y - 7))) continue;
        boxes.push(box);
        out.push({ x: to(mean.x), y: mean.y, text, xanchor: anchor, xshift: shiftX, yshift: shiftY, showarrow: false, bgcolor: css("--paper"), borderpad: 1, font: { size: 12.5, color: look(mean.g).colour } });
        break;
      }
    }
    return out;
  }

  // ---- the page -----------------------------------------------------------------------------------------------
  const figures = new Map(data.figures.filter((figure) => document.getElementById(`plot-${figure.id}`)).map((figure) => [figure.id, () => drawPoints(figure)]));
  if (document.getElementById("plot-curves")) figures.set("curves", drawCurves);
  // A figure whose every point was left out has nothing to draw: its table says why.
  document.querySelectorAll(".plot").forEach((element) => { if (!figures.has(element.id.slice(5))) element.closest("figure").hidden = true; });
  const redraw = () => drawn.forEach((id) => figures.get(id)());

  function paint() {
    data.groups.forEach((_, g) => {
      const colour = look(g).colour, off = runsOf[g].length > 0 && runsOf[g].every((run) => hidden.has(run.n));
      document.querySelectorAll(`.swatch[data-group="${g}"]`).forEach((swatch) => { swatch.style.borderColor = colour; });
      document.querySelectorAll(`.shape[data-group="${g}"], .strip[data-group="${g}"], .needles [data-group="${g}"], .heatmap span[data-group="${g}"]`).forEach((element) => {
        element.classList.toggle(element.tagName === "SPAN" ? "off-cell" : "off", off);
        if (element.classList.contains("shape")) element.style.setProperty("--shape", data.groups[g].base ? css("--soft") : colour);
      });
      document.querySelector(`#results tbody[data-group="${g}"] tr.group`)?.classList.toggle("off", off);
    });
  }

  const table = document.getElementById("results");
  table.addEventListener("change", (event) => {
    const box = event.target, body = box.closest("tbody");
    if (box.dataset.run !== undefined) {
      hidden[box.checked ? "delete" : "add"](box.dataset.run);
      const own = runsOf[+body.dataset.group], shown = own.filter((run) => !hidden.has(run.n)).length, main = body.querySelector("tr.group input");
      main.checked = shown > 0; main.indeterminate = shown > 0 && shown < own.length;
    } else {
      runsOf[+box.dataset.group].forEach((run) => hidden[box.checked ? "delete" : "add"](run.n));
      body.querySelectorAll("tr.run input").forEach((input) => { input.checked = box.checked; });
    }
    paint(); redraw();
  });
  table.addEventListener("click", (event) => {
    const fold = event.target.closest(".fold"), sort = event.target.closest(".sort");
    if (fold) {
      const open = fold.getAttribute("aria-expanded") !== "true";
      fold.setAttribute("aria-expanded", open);
      fold.closest("tbody").querySelectorAll("tr.run").forEach((row) => { row.hidden = !open; });
    } else if (sort) {
      const head = sort.closest("th"), up = head.getAttribute("aria-sort") !== "ascending", column = +sort.dataset.column;
      table.querySelectorAll("th[aria-sort]").forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (body) => body.querySelector("tr.group").children[column + 1].dataset.value;
      const bodies = [...table.tBodies].sort((a, b) => {
        const left = value(a), right = value(b);
        if (column === 0) return (up ? 1 : -1) * left.localeCompare(right, undefined, { numeric: true });
        if (left === "" || right === "") return (left === "") - (right === "");  // unknown values last, either way
        return (up ? 1 : -1) * (+left - +right);
      });
      table.append(...bodies);
    }
  });
  document.querySelectorAll(".controls input").forEach((input) => input.addEventListener("change", drawCurves));

  const theme = document.getElementById("theme"), themes = ["system", "light", "dark"];
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % 3];
    if (next === "system") delete root.dataset.theme; else root.dataset.theme = next;
    theme.textContent = `Theme: ${next}`; paint(); redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paint(); redraw(); });
  let timer = 0;
  const widths = new Map();
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => {
    if (widths.get(entry.target.id) === entry.contentRect.width) return;
    widths.set(entry.target.id, entry.contentRect.width); clearTimeout(timer); timer = setTimeout(redraw, 120);
  }));

  function draw(id) {
    if (drawn.has(id) || !figures.has(id)) return;
    const element = document.getElementById(`plot-${id}`);
    drawn.add(id); widths.set(element.id, element.clientWidth); figures.get(id)(); sizes.observe(element);
  }
  // Drawn when they come near the screen: a page of fifty runs opens at once.
  const watcher = new IntersectionObserver((entries) => entries.forEach((entry) => { if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target.id.slice(5)); } }), { rootMargin: "600px" });
  document.querySelectorAll(".plot").forEach((element) => watcher.observe(element));
  addEventListener("beforeprint", () => figures.forEach((_, id) => draw(id)));
  const links = [...document.querySelectorAll("nav a")];
  const spy = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((link) => { if (link.hash === `#${entry.target.id}`) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current"); });
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("main > section").forEach((part) => spy.observe(part));
  paint();
})();
