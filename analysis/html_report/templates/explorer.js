/* Interactive charts of the report: points of a table with axes and filters, and a timeline that zooms.
   Data are in <script type="application/json"> elements; without scripts the report's static charts remain. */
(() => {
"use strict";
const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8A6D00", "#882255"];
const SYMBOLS = ["circle", "rect", "triangle", "diamond", "emptyCircle", "emptyRect", "emptyTriangle", "emptyDiamond"];
const LARGE = 2000, TABLE_ROWS = 20, MOST_COLOURS = 24;

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const labelled = (words, control) => make("label", {}, words + " ", control);
const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const UNITS = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]],
  bytes: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
  "bytes/s": [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]],
};
const digits = value => Number(value.toPrecision(3)).toLocaleString("en", {maximumSignificantDigits: 3, notation:
  value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7) ? "scientific" : "standard"}).replace("E", "e");
const shown = (value, unit) => {
  if (value === null || value === undefined) return "not known";
  if (unit === "ratio") return `${digits(100 * value)} %`;
  const steps = UNITS[unit];
  if (!steps) return unit ? `${digits(value)} ${unit}` : digits(value);
  const [factor, name] = steps.find(([least]) => Math.abs(value) >= least) || steps[steps.length - 1];
  return `${digits(value / factor)} ${name}`;
};
const scaleOf = (column, rows) => {
  // the unit of an axis: that of its largest value, on a logarithmic axis of the geometric mean
  if (column.unit === "ratio") return [0.01, "%"];
  let [sum, largest] = [0, 0];
  for (const row of rows) {
    const size = Math.abs(column.values[row]);
    if (column.log) sum += Math.log(size);
    largest = Math.max(largest, size);
  }
  const typical = !rows.length ? 1 : column.log ? Math.exp(sum / rows.length) : largest;
  return UNITS[column.unit]?.find(([least]) => typical >= least) || [1, column.unit];
};
const quoted = word => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`;
const style = () => {
  const read = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return {text: read("--text"), soft: read("--soft"), line: read("--line"), faint: read("--faint"), back: read("--back")};
};
const AXIS_TEXT = {fontSize: 13};
const LEGEND = {left: 8, itemWidth: 14, itemGap: 16, padding: 5}, LEGEND_TEXT_GAP = 5, LEGEND_ROW = 32;
const pen = document.createElement("canvas").getContext("2d");
const legendRows = (names, width) => {
  // as ECharts breaks the line of a legend
  pen.font = `${AXIS_TEXT.fontSize}px system-ui, sans-serif`;
  const room = width - LEGEND.left - 2 * LEGEND.padding;
  let [rows, at] = [1, 0];
  for (const name of names) {
    const size = LEGEND.itemWidth + LEGEND_TEXT_GAP + pen.measureText(name).width;
    if (at && at + size > room) { rows++; at = 0; }
    at += size + LEGEND.itemGap;
  }
  return rows;
};
// of any two kinds, colour or symbol differs: the colours are repeated with the next symbols
const symbolOf = (column, kind) => SYMBOLS[(column?.symbols?.[kind] ??
  (column ? column.order[kind] + Math.floor(column.order[kind] / COLOURS.length) : 0)) % SYMBOLS.length];

function started(root) {
  const data = JSON.parse(root.querySelector("script").textContent);
  root.hidden = false;
  const chart = echarts.init(root.querySelector(".chart"), null, {renderer: "canvas"});
  const draw = root.dataset.kind === "timeline" ? timeline(root, data, chart) : points(root, data, chart);
  draw();
  let due = 0;
  const box = root.querySelector(".chart");
  let drawnWidth = box.clientWidth;
  const resized = () => {
    chart.resize();
    // the rows of the legend depend on the width
    if (root.dataset.kind !== "timeline" && box.clientWidth !== drawnWidth) { drawnWidth = box.clientWidth; draw(); }
  };
  new ResizeObserver(() => { cancelAnimationFrame(due); due = requestAnimationFrame(resized); }).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  performance.mark("explorer-drawn");
}

/* Points: one of each row of a table -------------------------------------------------------------------------------- */

function points(root, data, chart) {
  const columns = data.columns, count = data.names.length;
  const numbers = columns.filter(c => c.kind === "number"), texts = columns.filter(c => c.kind === "text");
  for (const column of texts) {
    if (!column.unit) continue;
    const named = column.words.map(word => isNaN(word) ? word : shown(Number(word), column.unit));
    if (new Set(named).size === named.length) column.words = named; // else some would look alike
  }
  const by = key => columns.find(c => c.key === key);
  const value = (column, row) => column.kind === "text" ? column.words[column.values[row]] : column.values[row];
  const words = (column, row) => column.kind === "text" ? value(column, row) : shown(value(column, row), column.unit);
  const box = root.querySelector(".chart"), status = root.querySelector(".status"), detail = root.querySelector(".detail");
  const state = {x: data.x, y: data.y, colour: data.colour, hidden: new Map(), order: [], sorted: false, at: -1, series: []};

  const choose = (name, options, chosen, act) => {
    const select = make("select", {}, ...options.map(c => make("option", {value: c.key, textContent: c.label})));
    select.value = chosen;
    select.addEventListener("change", () => { act(select.value); draw(); });
    return labelled(name, select);
  };
  const controls = root.querySelector(".controls");
  controls.append(
    choose("Horizontal axis:", numbers, state.x, key => { state.x = key; }),
    choose("Vertical axis:", numbers, state.y, key => { state.y = key; }));
  const colourable = texts.filter(c => c.words.length <= MOST_COLOURS);
  if (colourable.length) controls.append(choose("Colour:", colourable, state.colour, key => { state.colour = key; }));
  const filters = root.querySelector(".filters");
  for (const column of texts.filter(c => c.filter)) {
    const hidden = new Set();
    state.hidden.set(column, hidden);
    const boxes = column.words.map((word, index) => {
      const check = make("input", {type: "checkbox", checked: true});
      check.addEventListener("change", () => { check.checked ? hidden.delete(index) : hidden.add(index); draw(); });
      return [check, index, make("label", {}, check, " " + word)];
    });
    const all = on => () => {
      boxes.forEach(([check, index]) => { check.checked = on; on ? hidden.delete(index) : hidden.add(index); });
      draw();
    };
    const button = (name, on) => {
      const made = make("button", {type: "button", textContent: name, ariaLabel: `${name}: ${column.label}`});
      made.addEventListener("click", all(on));
      return made;
    };
    filters.append(make("fieldset", {}, make("legend", {textContent: column.label}),
      ...(boxes.length > 3 ? [button("all", true), button("none", false)] : []), ...boxes.map(each => each[2])));
  }

  const why = row => data.why.map(c => `${c.label}: ${words(c, row)}`);
  const sentence = row => `${data.names[row]}: ${by(state.x).label} ${words(by(state.x), row)}, ` +
    `${by(state.y).label} ${words(by(state.y), row)}`;
  const pick = row => {
    detail.replaceChildren(make("h3", {textContent: data.names[row]}));
    const list = make("dl");
    const facts = new Map([by(state.x), by(state.y), ...data.why].map(c => [c.label, words(c, row)]));
    for (const [term, text] of facts) list.append(make("dt", {textContent: term}), make("dd", {textContent: text}));
    detail.append(list);
    if (data.command) {
      const text = [...data.command.map(quoted), quoted(data.names[row])].join(" ");
      const code = make("code", {textContent: text}), copy = make("button", {type: "button", textContent: "Copy"});
      copy.addEventListener("click", () => {
        navigator.clipboard?.writeText(text).then(() => { copy.textContent = "Copied"; }, () => {
          getSelection().selectAllChildren(code);
        });
      });
      detail.append(make("p", {}, "The command that predicts it again: "), make("p", {className: "command"}, code, " ", copy));
    }
  };

  function draw() {
    const x = by(state.x), y = by(state.y), colour = state.colour ? by(state.colour) : null;
    const tests = [...state.hidden].filter(([, hidden]) => hidden.size);
    const groups = new Map();
    const order = [];
    let without = 0, passed = 0;
    rows: for (let row = 0; row < count; row++) {
      for (const [column, hidden] of tests) if (hidden.has(column.values[row])) continue rows;
      passed++;
      const [a, b] = [x.values[row], y.values[row]];
      if (a === null || b === null || (x.log && a <= 0) || (y.log && b <= 0)) { without++; continue; }
      const kind = colour ? colour.values[row] : 0;
      if (!groups.has(kind)) groups.set(kind, []);
      groups.get(kind).push(row);
      order.push(row);
    }
    Object.assign(state, {order, sorted: false, at: -1});
    const beside = data.diagonal && x.key === data.x && y.key === data.y; // both axes in one unit, to be read together
    const scales = [scaleOf(x, order), scaleOf(y, order)], largest = scales[0][0] > scales[1][0] ? scales[0] : scales[1];
    const [[xFactor, xUnit], [yFactor, yUnit]] = beside ? [largest, largest] : scales;
    Object.assign(state, {xFactor, yFactor});
    const kinds = [...groups.keys()].sort((p, q) => p - q);
    state.series = kinds.map(kind => groups.get(kind));
    const ink = style();
    const series = kinds.map((kind, i) => {
      const rows = groups.get(kind), flat = new Float64Array(2 * rows.length);
      rows.forEach((row, j) => { flat[2 * j] = x.values[row] / xFactor; flat[2 * j + 1] = y.values[row] / yFactor; });
      const index = colour ? colour.order[kind] : 0;
      return {id: `k${i}`, type: "scatter", name: colour ? colour.words[kind] : "points", data: flat, dimensions: ["x", "y"],
        symbol: symbolOf(colour, kind), symbolSize: count > LARGE ? 6 : 9, large: order.length > LARGE,
        largeThreshold: LARGE, itemStyle: {color: colour?.colours?.[kind] ?? COLOURS[index % COLOURS.length], opacity: 0.75}, emphasis: {scale: 1.6}};
    });
    if (beside && order.length) {
      const all = order.flatMap(row => [x.values[row], y.values[row]]);
      const [low, high] = [Math.min(...all), Math.max(...all)];
      series.push({id: "diagonal", type: "line", name: data.diagonal, data: [[low / xFactor, low / yFactor], [high / xFactor, high / yFactor]], symbol: "none",
        silent: true, lineStyle: {color: ink.soft, type: "dashed", width: 1.5}, itemStyle: {color: ink.soft}, tooltip: {show: false}});
    }
    series.push({id: "cursor", type: "scatter", name: "", data: [], symbol: "circle", symbolSize: 18, silent: true, z: 9,
      itemStyle: {color: "transparent", borderColor: ink.text, borderWidth: 3}});
    const axis = (column, unit, gap) => ({type: column.log ? "log" : "value", name: unit ? `${column.label} (${unit})` : column.label, nameLocation: "middle", nameGap: gap,
      scale: true, min: column.log ? undefined : v => (v.min >= 0 && v.min < 0.5 * v.max ? 0 : undefined),
      nameTextStyle: {color: ink.text, fontSize: 14, fontWeight: "bold"}, axisLine: {onZero: false, lineStyle: {color: ink.line}},
      axisLabel: {color: ink.text, ...AXIS_TEXT, hideOverlap: true, formatter: digits},
      splitLine: {lineStyle: {color: ink.faint}}, minorTick: {show: column.log}});
    const legend = series.filter(s => s.name).map(s => s.name);
    chart.setOption({
      animation: false, backgroundColor: "transparent", textStyle: {fontFamily: "system-ui, sans-serif"},
      grid: {left: 92, right: 34, top: 18 + (colour ? LEGEND_ROW * legendRows(legend, box.clientWidth) : 0), bottom: 62},
      legend: {show: Boolean(colour), ...LEGEND, top: 0, textStyle: {color: ink.text, ...AXIS_TEXT}, inactiveColor: ink.soft,
        data: legend, selectedMode: false},
      tooltip: {trigger: "item", confine: true, backgroundColor: ink.back, borderColor: ink.line, textStyle: {color: ink.text},
        extraCssText: "white-space: normal; width: max-content; max-width: min(34rem, 85%); overflow-wrap: anywhere;",
        formatter: hit => {
          const row = state.series[hit.seriesIndex]?.[hit.dataIndex];
          return row === undefined ? "" : `<b>${escaped(data.names[row])}</b><br>` +
            [by(state.x), by(state.y)].map(c => `${escaped(c.label)}: ${escaped(words(c, row))}`).concat(why(row).map(escaped)).join("<br>");
        }},
      xAxis: axis(x, xUnit, 34), yAxis: axis(y, yUnit, 60), series,
    }, {notMerge: true});
    const less = without ? `; ${without.toLocaleString("en")} more have no ${x.label} or ${y.label}` +
      `${x.log || y.log ? " above zero" : ""}, and are not drawn` : "";
    status.textContent = `${order.length.toLocaleString("en")} of ${count.toLocaleString("en")} points are drawn${less}` +
      `${passed < count ? `; ${(count - passed).toLocaleString("en")} are filtered out` : ""}.`;
    listed();
  }

  const folded = root.querySelector("details.rows");
  const listed = () => {
    if (!folded.open) return;
    const y = by(state.y), sign = data.larger.includes(state.y) ? -1 : 1;
    const best = [...state.order].sort((p, q) => sign * (y.values[p] - y.values[q])).slice(0, TABLE_ROWS);
    const shownColumns = [by(state.x), y, ...data.why];
    const head = make("tr", {}, ...["point", ...new Set(shownColumns.map(c => c.label))].map(label => make("th", {scope: "col", textContent: label})));
    const body = best.map(row => {
      const button = make("button", {type: "button", textContent: data.names[row]});
      button.addEventListener("click", () => { pick(row); detail.focus(); });
      const cells = new Map(shownColumns.map(c => [c.label, words(c, row)]));
      return make("tr", {}, make("th", {scope: "row"}, button), ...[...cells.values()].map(text => make("td", {textContent: text})));
    });
    const caption = make("caption", {}, make("span", {textContent: `The ${best.length} points shown with the ${sign < 0 ? "largest" : "least"} ${y.label}`}));
    folded.querySelector(".scroll").replaceChildren(make("table", {}, caption, make("thead", {}, head), make("tbody", {}, ...body)));
  };
  folded.addEventListener("toggle", listed);

  const go = at => {
    if (!state.order.length) return;
    sortByX();
    state.at = Math.max(0, Math.min(state.order.length - 1, at));
    const row = state.order[state.at];
    chart.setOption({series: [{id: "cursor", data: [[by(state.x).values[row] / state.xFactor, by(state.y).values[row] / state.yFactor]]}]});
    status.textContent = `${sentence(row)}. ${why(row).join(". ")}`;
  };
  const sortByX = () => {
    if (state.sorted) return;
    const [x, y] = [by(state.x).values, by(state.y).values];
    state.order.sort((p, q) => x[p] - x[q] || y[p] - y[q]);
    state.sorted = true;
  };
  const page = () => Math.max(1, Math.round(state.order.length / 20));
  box.addEventListener("keydown", event => {
    const moves = {ArrowRight: () => go(state.at + 1), ArrowLeft: () => go(state.at - 1), Home: () => go(0),
      End: () => go(state.order.length - 1), PageDown: () => go(state.at + page()), PageUp: () => go(state.at - page()),
      Enter: () => state.at >= 0 && pick(state.order[state.at])};
    if (moves[event.key]) { event.preventDefault(); moves[event.key](); }
  });
  chart.on("click", hit => {
    const row = state.series[hit.seriesIndex]?.[hit.dataIndex];
    if (row !== undefined) { pick(row); sortByX(); go(state.order.indexOf(row)); }
  });
  return draw;
}

/* Timeline: blocks of time by rank, predicted above measured -------------------------------------------------------- */

function timeline(root, data, chart) {
  const box = root.querySelector(".chart"), status = root.querySelector(".status");
  box.style.height = `${140 + 30 * data.lanes.length}px`;
  chart.resize();
  const zoom = {start: 0, end: 100};
  const [factor, unit] = scaleOf({unit: "s", values: [data.longest_s]}, [0]);
  const dark = new Set(["backward", "exposed communication"]);
  const block = (params, api) => {
    const [left, y] = api.coord([api.value(1), api.value(0)]), [right] = api.coord([api.value(2), api.value(0)]);
    const band = api.size([0, 1])[1], lane = data.lanes[api.value(0)];
    const high = (lane.thin ? 0.45 : 0.8) * band, area = params.coordSys;
    const rect = echarts.graphic.clipRectByRect({x: left, y: y - high / 2, width: Math.max(right - left, 0.5), height: high},
      {x: area.x, y: area.y, width: area.width, height: area.height});
    if (!rect) return null;
    const kind = data.phases[data.blocks[params.dataIndex][3]], text = data.labels[data.blocks[params.dataIndex][4]];
    return {type: "rect", shape: rect, style: {fill: lane.thin ? "#DDBBCC" : kind.colour, stroke: "#333", lineWidth: rect.width > 3 ? 0.6 : 0,
      ...(lane.predicted && !lane.thin ? {decal: {symbol: "rect", dashArrayX: [1, 0], dashArrayY: [2, 5], rotation: -Math.PI / 4, color: "rgba(255,255,255,0.28)"}} : {})},
      textContent: {style: {text, fill: dark.has(kind.name) && !lane.thin ? "#fff" : "#111", fontSize: lane.thin ? 11 : 12, overflow: "truncate", width: rect.width - 6, ellipsis: "…"},
        ignore: rect.width < 7 * text.length + 8}, textConfig: {position: "inside"}};
  };
  function draw() {
    const ink = style();
    chart.setOption({
      animation: false, backgroundColor: "transparent", textStyle: {fontFamily: "system-ui, sans-serif"},
      grid: {left: 260, right: 24, top: 44, bottom: 92},
      legend: {top: 4, left: 8, selectedMode: false, textStyle: {color: ink.text, ...AXIS_TEXT}, data: data.phases.filter(p => p.used).map(p => p.name)},
      tooltip: {trigger: "item", confine: true, backgroundColor: ink.back, borderColor: ink.line, textStyle: {color: ink.text},
        formatter: hit => {
          if (hit.seriesId !== "blocks") return "";
          const [lane, start, end, phase, label] = data.blocks[hit.dataIndex];
          return `<b>${escaped(data.labels[label])}</b><br>${escaped(data.lanes[lane].name)}<br>${escaped(data.phases[phase].name)}: ` +
            `${shown(end - start, "s")}, from ${shown(start, "s")} to ${shown(end, "s")}`;
        }},
      xAxis: {type: "value", min: 0, max: data.longest_s / factor, name: `time since the step began (${unit})`, nameLocation: "middle", nameGap: 32,
        nameTextStyle: {color: ink.text, fontSize: 14, fontWeight: "bold"}, axisLabel: {color: ink.text, ...AXIS_TEXT, hideOverlap: true, formatter: digits},
        splitLine: {lineStyle: {color: ink.faint}}},
      yAxis: {type: "category", inverse: true, data: data.lanes.map(l => l.name), axisTick: {show: false},
        axisLabel: {color: ink.text, ...AXIS_TEXT, interval: 0, width: 245, overflow: "truncate"}, axisLine: {lineStyle: {color: ink.line}}},
      dataZoom: [{type: "slider", xAxisIndex: 0, bottom: 10, height: 22, filterMode: "none", labelFormatter: v => shown(v * factor, "s"), textStyle: {color: ink.text}, ...zoom},
        {type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, ...zoom}],
      series: [{id: "blocks", type: "custom", renderItem: block, encode: {x: [1, 2], y: 0}, data: data.blocks.map(([lane, start, end]) => [lane, start / factor, end / factor]), clip: true},
        ...data.phases.filter(p => p.used).map(p => ({type: "bar", name: p.name, data: [], itemStyle: {color: p.colour}}))],
    }, {notMerge: true});
  }
  const to = (start, end) => {
    const width = Math.max(0.05, Math.min(100, end - start)), first = Math.max(0, Math.min(100 - width, start));
    Object.assign(zoom, {start: first, end: first + width});
    chart.dispatchAction({type: "dataZoom", dataZoomIndex: 0, ...zoom});
  };
  chart.on("dataZoom", () => {
    const now = chart.getOption().dataZoom[0];
    Object.assign(zoom, {start: now.start, end: now.end});
    status.textContent = `From ${shown(now.start / 100 * data.longest_s, "s")} to ${shown(now.end / 100 * data.longest_s, "s")}.`;
  });
  const scaled = factor => { const middle = (zoom.start + zoom.end) / 2, half = (zoom.end - zoom.start) / 2 * factor; to(middle - half, middle + half); };
  const moved = part => { const by = part * (zoom.end - zoom.start); to(zoom.start + by, zoom.end + by); };
  const acts = {"+": () => scaled(0.5), "=": () => scaled(0.5), "-": () => scaled(2), ArrowRight: () => moved(0.25), ArrowLeft: () => moved(-0.25), Home: () => to(0, 100)};
  box.addEventListener("keydown", event => { if (acts[event.key]) { event.preventDefault(); acts[event.key](); } });
  const controls = root.querySelector(".controls");
  for (const [name, key] of [["Zoom in", "+"], ["Zoom out", "-"], ["Earlier", "ArrowLeft"], ["Later", "ArrowRight"], ["Whole step", "Home"]]) {
    const button = make("button", {type: "button", textContent: name});
    button.addEventListener("click", acts[key]);
    controls.append(button);
  }
  return draw;
}

/* called by the script after each element, so that charts are there before the rest of a long page */
window.drawExplorers = () => {
  for (const root of document.querySelectorAll(".explorer[hidden]")) started(root);
};
})();
