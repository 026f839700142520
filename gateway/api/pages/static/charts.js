// The curves of a board with uPlot. The server's drawings stay until a chart is visible.
"use strict";
(() => {
  const board = document.getElementById("board");
  if (!board || !window.uPlot) return;
  const runs = JSON.parse(board.dataset.runs);
  const MOST = 2000; // points of a curve in the page
  const curves = new Map(); // "RUN NAME" to {step, value, at}
  const plots = new Map(); // a figure to its uPlot
  const options = { smoothing: 0, axis: "step", log: false };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const curve = (run, name) => {
    const key = `${run} ${name}`;
    if (!curves.has(key)) curves.set(key, { step: [], value: [], at: [] });
    return curves.get(key);
  };
  const finite = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

  function format(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value === "string") return value;
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
    return size >= 1e-4 && size < 1e7 ? value.toLocaleString("en", { maximumSignificantDigits: 4 }) : value.toExponential(2);
  }

  function addPoint(into, step, value, at) {
    const last = into.step.length - 1;
    let place = last + 1;
    while (place > 0 && into.step[place - 1] >= step) place--; // later rows of a step count
    const replaced = into.step[place] === step ? 1 : 0;
    into.step.splice(place, replaced, step);
    into.value.splice(place, replaced, value);
    into.at.splice(place, replaced, at);
    if (into.step.length > MOST) thin(into);
  }

  // Keep the least and the greatest of each four points but the newest.
  function thin(into) {
    const keep = new Set([0]);
    const end = into.step.length - 100;
    for (let start = 0; start < end; start += 4) {
      let low = start, high = start;
      for (let i = start; i < Math.min(start + 4, end); i++) {
        if (into.value[i] < into.value[low]) low = i;
        if (into.value[i] > into.value[high]) high = i;
      }
      keep.add(low).add(high);
    }
    for (const field of ["step", "value", "at"]) into[field] = into[field].filter((_, i) => keep.has(i) || i >= end);
  }

  function smoothed(values) {
    const weight = options.smoothing;
    if (!weight) return values;
    let mean = 0, share = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      share = weight * share + (1 - weight);
      return mean / share;
    });
  }

  function dataOf(name) {
    const tables = runs.map((run) => {
      const found = curve(run, name);
      let values = smoothed(found.value.map(finite));
      if (options.log) values = values.map((value) => (value > 0 ? value : null));
      return [found[options.axis], values];
    });
    return tables.length === 1 ? tables[0] : uPlot.join(tables);
  }

  function marks() {
    const holder = document.querySelector("[data-marks]");
    return holder && options.axis === "step" ? JSON.parse(holder.dataset.marks) : [];
  }

  function drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = style("--warn");
    ctx.setLineDash([4, 4]);
    for (const { step } of marks()) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function showValues(figure, plot) {
    const last = figure.querySelector(".last");
    const index = plot.cursor.idx;
    if (index === null || index === undefined) {
      last.textContent = runs.length === 1 ? format(curve(runs[0], figure.dataset.name).value.at(-1)) : "";
      return;
    }
    const x = plot.data[0][index];
    const where = options.axis === "step" ? `step ${format(x)}` : new Date(1000 * x).toLocaleString();
    const mark = marks().find((each) => each.step === x);
    const values = plot.data.slice(1).map((series) => format(series[index]));
    last.textContent = `${values.join(" · ")} at ${where}${mark ? `, ${mark.text}` : ""}`;
  }

  function draw(figure) {
    const canvas = figure.querySelector(".canvas");
    const name = figure.dataset.name;
    const text = style("--muted"), grid = { stroke: style("--line"), width: 1 };
    const axis = { stroke: text, grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const series = runs.map((_, index) => ({
      stroke: style(`--c${index + 1}`), width: 1.6, spanGaps: runs.length > 1,
      points: { show: curve(runs[index], name).step.length < 2, size: 5 },
    }));
    plots.get(figure)?.destroy();
    canvas.textContent = "";
    const plot = new uPlot({
      width: Math.max(160, canvas.clientWidth), height: 200, legend: { show: false }, padding: [10, 10, 0, 0],
      cursor: { sync: { key: "board" }, y: false, points: { size: 6 } },
      scales: { x: { time: options.axis === "at" }, y: { distr: options.log ? 3 : 1 } },
      axes: [{ ...axis, size: 26 }, { ...axis, size: 56, values: (_, found) => found.map((value) => (value === null ? "" : format(value))) }],
      series: [{}, ...series],
      hooks: { draw: [drawMarks], setCursor: [(each) => showValues(figure, each)] },
    }, dataOf(name), canvas);
    plots.set(figure, plot);
    showValues(figure, plot);
  }

  // Charts that come into view are read together.
  const wanted = new Set();
  async function read() {
    const figures = [...wanted].slice(0, 40);
    figures.forEach((figure) => wanted.delete(figure));
    if (!figures.length) return;
    const names = figures.map((figure) => `name=${encodeURIComponent(figure.dataset.name)}`).join("&");
    try {
      await Promise.all(runs.map(async (run) => {
        const answer = await fetch(`/runs/${encodeURIComponent(run)}/curves?${names}`);
        if (!answer.ok) throw new Error(answer.statusText);
        for (const [name, found] of Object.entries(await answer.json())) {
          const newer = curve(run, name);
          curves.set(`${run} ${name}`, found);
          newer.step.forEach((step, i) => addPoint(found, step, newer.value[i], newer.at[i]));
        }
      }));
      figures.forEach(draw);
    } catch { // the drawings of the server stay
      figures.forEach((figure) => seen.observe(figure));
    }
    if (wanted.size) read();
  }
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      seen.unobserve(target);
      if (!wanted.size) setTimeout(read);
      wanted.add(target);
    }
  }, { rootMargin: "200px" });
  const figures = [...board.querySelectorAll("figure")];
  figures.forEach((figure) => seen.observe(figure));

  const redraw = () => plots.forEach((_, figure) => draw(figure));
  document.addEventListener("points", ({ detail }) => {
    if (runs.length !== 1) return;
    const unknown = [];
    for (const [name, points] of Object.entries(detail)) {
      if (!figures.some((figure) => figure.dataset.name === name)) unknown.push(name);
      points.forEach(([step, value, at]) => addPoint(curve(runs[0], name), step, value, at));
    }
    if (unknown.some((name) => !name.startsWith("tandem/seconds/"))) location.reload();
    plots.forEach((plot, figure) => {
      if (figure.dataset.name in detail) { plot.setData(dataOf(figure.dataset.name)); showValues(figure, plot); }
    });
  });

  document.getElementById("tools").hidden = false;
  document.getElementById("smoothing").addEventListener("input", (event) => { options.smoothing = Number(event.target.value); redraw(); });
  document.getElementById("axis").addEventListener("change", (event) => { options.axis = event.target.value; redraw(); });
  document.getElementById("log").addEventListener("change", (event) => { options.log = event.target.checked; redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
})();
