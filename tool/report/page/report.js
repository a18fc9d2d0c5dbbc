// Plots, sorting and searching of the page of `switchyard report`. Without it the tables stand.
"use strict";
(() => {
  document.documentElement.classList.add("js");
  const DIGITS = 3;

  // "4.2k", "13", "0.05": what fits beside an axis.
  function with_digits(value, digits) {
    const size = Math.abs(value);
    const steps = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    for (const [unit, letter] of steps) {
      if (size >= unit) return Number((value / unit).toPrecision(digits)) + letter;
    }
    return String(Number(value.toPrecision(digits)));
  }
  const short = (value) => with_digits(value, DIGITS);

  // Round values of an axis: decades, or 1, 2 and 5 of them, or even steps where it is short.
  function ticks(low, high, pixels, spacing, log) {
    const most = Math.max(2, Math.floor(pixels / spacing));
    const values = [];
    let digits = DIGITS;
    const decades = log ? Math.log10(high / low) : 0;
    if (decades > 1) {
      const parts = decades * 3 <= most ? [1, 2, 5] : [1];
      const step = Math.max(1, Math.ceil(decades / most));
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); ++e) {
        if (e % step) continue;
        for (const part of parts) values.push(part * 10 ** e);
      }
    } else {
      const raw = (high - low) / most;
      const unit = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 5, 10].find((part) => part * unit >= raw) * unit;
      for (let v = Math.ceil(low / step) * step; v <= high; v += step) values.push(v);
      // So that neighbours are told apart.
      const largest = Math.max(Math.abs(low), Math.abs(high));
      digits = Math.min(9, Math.max(DIGITS, Math.ceil(Math.log10(largest / step)) + 1));
    }
    return values.filter((v) => v >= low && v <= high)
      .map((v) => ({v, label: with_digits(v, digits)}));
  }
  const ticker = (spacing, log) => (low, high, pixels) => ticks(low, high, pixels, spacing, log);

  // What is seen at first: all points and some air.
  function window_of(values, log) {
    const low = Math.min(...values);
    const high = Math.max(...values);
    if (log) {
      const air = Math.max((high / low) ** 0.06, 1.15);
      return [low / air, high * air];
    }
    const air = (high - low || Math.abs(high) || 1) * 0.05;
    return [low >= 0 && low < air * 4 ? -air / 4 : low - air, high + air];
  }

  function colors_of(series) {
    const style = getComputedStyle(document.documentElement);
    let next = 0;
    return series.map((one) => {
      const neutral = one.mark === "roof" || /(^|: )limit$/.test(one.name);
      return style.getPropertyValue(neutral ? "--roof" : `--c${next++ % 10}`).trim();
    });
  }

  function series_options(series) {
    const roofs = [null, [9, 3], [3, 3]];
    let roof = 0;
    return Object.fromEntries(series.map((one) => [one.name, {
      strokeWidth: one.mark === "dots" ? 0 : 1.8,
      strokePattern: one.mark === "dashed" ? [5, 4] : one.mark === "roof" ? roofs[roof++ % 3] : null,
      drawPoints: one.mark === "dots" || one.mark === "line",
      pointSize: one.mark === "dots" ? 3.2 : 2.6,
    }]));
  }

  // A row a point: several points of a series may share their x.
  function rows_of(series, bands) {
    const rows = [];
    series.forEach((one, at) => one.points.forEach(([x, y, note, low, high]) => {
      const values = new Array(series.length).fill(null);
      values[at] = bands ? [low ?? y, y, high ?? y] : y;
      rows.push({x, values, note});
    }));
    rows.sort((a, b) => a.x - b.x);
    return rows;
  }

  function legend_of(place, series, colors, graph) {
    let roofs = 0;
    place.replaceChildren(...series.map((one, at) => {
      const button = document.createElement("button");
      const swatch = document.createElement("i");
      if (one.mark === "roof") swatch.className = `stroke roof${roofs++ % 3 + 1}`;
      if (one.mark === "dashed") swatch.className = "stroke dashed";
      swatch.style.background = swatch.style.borderColor = colors[at];
      button.append(swatch, one.name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const on = !graph.visibility()[at];
        graph.setVisibility(at, on);
        button.setAttribute("aria-pressed", String(on));
      });
      return button;
    }));
  }

  const drawn = new Map();

  function draw(figure) {
    if (drawn.has(figure) || !window.Dygraph) return;
    const {x, y, series} = JSON.parse(figure.querySelector("script").textContent);
    const bands = series.some((one) => one.points.some((point) => point.length > 3));
    const rows = rows_of(series, bands);
    const points = series.flatMap((one) => one.points);
    const output = figure.querySelector("output");
    const colors = colors_of(series);
    const style = getComputedStyle(document.documentElement);
    const axis = (log, spacing, width) => ({
      logscale: log, ticker: ticker(spacing, log), axisLabelWidth: width,
      valueFormatter: short, axisLabelFormatter: short,
    });
    const graph = new Dygraph(figure.querySelector(".canvas"), rows.map((row) => [row.x, ...row.values]), {
      labels: [x.label, ...series.map((one) => one.name)],
      series: series_options(series),
      customBars: bands,
      connectSeparatedPoints: true,
      xlabel: x.label, ylabel: y.label, xLabelHeight: 20, yLabelWidth: 20,
      axes: {x: axis(x.log, 58, 56), y: axis(y.log, 34, 54)},
      logscale: y.log,
      dateWindow: window_of(points.map((point) => point[0]), x.log),
      valueRange: window_of(points.flatMap((point) => [point[1], ...point.slice(3)]), y.log),
      colors, gridLineColor: style.getPropertyValue("--grid").trim(),
      axisLineColor: style.getPropertyValue("--line").trim(),
      labelsDiv: document.createElement("div"),
      highlightCircleSize: 5, highlightSeriesOpts: {}, highlightSeriesBackgroundAlpha: 1,
      highlightCallback: (event, at, hovered, row, name) => {
        const one = hovered.find((point) => point.name === name);
        if (!one) return;
        const note = rows[row] && rows[row].note;
        output.textContent = `${name}: ${short(one.xval)} ${x.label}, ${short(one.yval)} ${y.label}` +
          (note ? ` (${note})` : "");
      },
      unhighlightCallback: () => { output.textContent = ""; },
    });
    drawn.set(figure, {graph, series});
    legend_of(figure.querySelector(".legend"), series, colors, graph);
  }

  function recolor() {
    const style = getComputedStyle(document.documentElement);
    const grid = style.getPropertyValue("--grid").trim();
    const line = style.getPropertyValue("--line").trim();
    for (const [figure, {graph, series}] of drawn) {
      const colors = colors_of(series);
      graph.updateOptions({colors, gridLineColor: grid, axisLineColor: line});
      figure.querySelectorAll(".legend i").forEach((swatch, at) => {
        swatch.style.background = swatch.style.borderColor = colors[at];
      });
    }
  }

  const figures = [...document.querySelectorAll("figure.plot")];
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(entry.target);
  }, {rootMargin: "600px"});
  for (const figure of figures) {
    const box = figure.getBoundingClientRect();
    if (box.width > 0 && box.top < innerHeight) draw(figure);
    else seen.observe(figure);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("print");
    figures.filter((figure) => figure.offsetWidth > 0).forEach(draw);
    recolor();
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("print");
    recolor();
  });

  // Tables: a click on a head sorts, once more turns the order round.
  const compare = new Intl.Collator(undefined, {numeric: true}).compare;
  function sort(table, column, head) {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const text = (row) => row.cells[column] ? row.cells[column].textContent : "";
    const rows = [...table.tBodies[0].rows].map((row) => ({row, text: text(row), value: Number(text(row))}));
    rows.sort((a, b) => {
      if (a.text === "" || b.text === "") return (a.text === "") - (b.text === "");
      const order = Number.isFinite(a.value) && Number.isFinite(b.value) ? a.value - b.value
        : compare(a.text, b.text);
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows.map(({row}) => row));
  }
  for (const table of document.querySelectorAll("table:not(.heat)")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      button.addEventListener("click", () => sort(table, column, head));
      head.append(button);
    });
    if (table.tBodies[0].rows.length <= 12) continue;
    const search = document.createElement("input");
    search.type = "search";
    search.placeholder = "only rows with these words";
    search.setAttribute("aria-label", search.placeholder);
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of table.tBodies[0].rows) {
        const text = [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    table.closest(".scroll").before(search);
  }
})();
