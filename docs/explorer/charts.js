// Drawing: the weights of every sample with the blocks above them, and the small charts. Plain SVG.

const charts = (() => {
  "use strict";

  const CURVE = 400; // points at which a curve is drawn

  /** An SVG element with these attributes and children. */
  function svg(tag, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** A number as people write it: 1,150 or 287.5 or 0.0589. */
  function shown(x) {
    x = Number(x.toPrecision(12)); // 287.49999999999994 is 287.5
    if (x !== 0 && Math.abs(x) < 0.0005) return x.toExponential(1).replace("e-", "e−");
    if (Math.abs(x) < 1) return x.toLocaleString("en-US", { maximumSignificantDigits: 3 });
    return x.toLocaleString("en-US", { maximumFractionDigits: Math.abs(x) < 100 ? 2 : 1 });
  }

  /** Round numbers from 0 to `most`, about `about` of them. */
  function ticks(most, about) {
    const rough = most / about, power = 10 ** Math.floor(Math.log10(rough));
    const step = Math.max(1, [1, 2, 5, 10].find((times) => times * power >= rough) * power);
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
  }

  /** The outline of runs of samples, newest first: [[age, weight], …], in steps or as a curve. */
  function outline(runs, reach) {
    const points = [];
    let age = 0;
    for (const [size, run] of runs) {
      if (typeof run === "number") {
        points.push([age, run], [age + size, run]);
      } else {
        const end = Math.min(size, Math.ceil(reach) + 1), stride = Math.max(1, end / CURVE);
        for (let i = 0; i < end; i += stride) {
          const weight = run[Math.floor(i)];
          points.push([Math.floor(i), weight]);
          if (stride === 1 && end <= 60) points.push([i + 1, weight]); // few: each is a step
        }
      }
      age += size;
    }
    points.push([age, 0]);
    return points;
  }

  /** The weight of the sample of this age. */
  function weightAt(runs, age) {
    for (const [size, run] of runs) {
      if (age < size) return typeof run === "number" ? run : run[age];
      age -= size;
    }
    return 0;
  }

  const line = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  /** The main figure: blocks, the window, and what each sample weighs.
   *
   * `chosen` has the runs and the name of a method, `behind` those of the ones behind it; `blocks` is
   * a list of { start, end, weight, label, open, fades }. Returns where samples are: the age at a
   * place, and a function that marks it.
   */
  function weights(frame, { t, size, blocks, chosen, behind, caption }) {
    const width = frame.clientWidth, height = 330;
    const left = 44, right = width - 12, top = 98, bottom = height - 44;
    const n = Math.min(size, t), reach = Math.max(1, Math.min(t, 2.2 * n));
    const x = (age) => right - ((right - left) * age) / reach;
    const y = (weight) => bottom - ((bottom - top) * Math.min(weight * n, 2.15)) / 2.15;
    const drawn = [];

    // blocks
    drawn.push(svg("text", { x: left, y: 14, class: "x-label" }, caption));
    for (const { start, end, weight, label, open, fades } of blocks) {
      const from = Math.max(left, x(t - start)), to = x(t - end);
      if (to < left + 1) continue;
      const box = { x: from + 0.75, y: 24, width: Math.max(0.75, to - from - 1.5), height: 34, rx: 3 };
      const strength = (weight) => `--strength: ${(12 + 48 * Math.min(1, weight * n)).toFixed(1)}%`;
      if (fades) {
        const stop = (_, i) => svg("stop", {
          offset: i / 20, class: "x-stop", style: strength(weightAt(chosen.runs, Math.floor(reach * (1 - i / 20)))) });
        drawn.push(svg("linearGradient", { id: "x-fade" }, ...Array.from({ length: 21 }, stop)));
      }
      drawn.push(
        svg("rect", {
          ...box, class: `x-block${open ? " x-open" : ""}${weight > 0 ? "" : " x-idle"}${fades ? " x-fades" : ""}`,
          "data-start": start, "data-end": end, style: strength(weight),
        }, svg("title", {}, `samples ${(start + 1).toLocaleString("en-US")} to ${end.toLocaleString("en-US")}`)),
      );
      if (to - from > 9 * label.length + 8)
        drawn.push(svg("text", { x: (from + to) / 2, y: 46, class: "x-size" }, label));
    }

    // the window
    const edge = x(Math.min(n, reach));
    drawn.push(
      svg("path", { d: `M${edge} 66v8H${right}v-8`, class: "x-bracket" }),
      svg("text", { x: right, y: 90, class: "x-label x-end" },
        `window: the last ${shown(size)}${size > t ? `, ${shown(t)} so far` : ""}`),
    );

    // axes
    for (const times of [0, 1, 2]) {
      const at = y(times / n);
      drawn.push(
        svg("line", { x1: left, x2: right, y1: at, y2: at, class: times ? "x-grid" : "x-axis" }),
        svg("text", { x: left - 6, y: at + 4, class: "x-tick x-end" }, times ? `${times}/k` : "0"),
      );
    }
    for (const age of ticks(reach, Math.max(3, width / 150))) {
      const at = x(age);
      if (at < left) continue;
      drawn.push(
        svg("line", { x1: at, x2: at, y1: bottom, y2: bottom + 4, class: "x-axis" }),
        svg("text", { x: at, y: bottom + 18, class: `x-tick${age ? "" : " x-end"}` },
          age ? age.toLocaleString("en-US") : "newest"),
      );
    }
    drawn.push(svg("text", { x: left, y: height - 6, class: "x-label" }, "← age of the sample"));

    // weights
    const place = (runs) =>
      outline(runs, reach).map(([age, weight]) => [Math.max(left, x(age)), y(weight)]);
    for (const { name, runs } of behind)
      drawn.push(svg("path", { d: line(place(runs)), class: `x-line x-behind x-${name}` }));
    const points = place(chosen.runs), last = points[points.length - 1][0];
    const edges = `M${right} ${bottom}${line(points).replace("M", "L")}`;
    drawn.push(
      svg("path", { d: `${edges}L${last} ${bottom}Z`, class: `x-area x-${chosen.name}` }),
      svg("path", { d: edges, class: `x-line x-${chosen.name}` }),
    );

    const guide = svg("line", { y1: 24, y2: bottom, class: "x-guide", visibility: "hidden" });
    const canvas = { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" };
    frame.replaceChildren(svg("svg", canvas, ...drawn, guide));
    return {
      ageAt: (place) => Math.min(t - 1, Math.max(0, Math.floor((reach * (right - place)) / (right - left)))),
      mark: (place) => {
        const at = Math.min(right, Math.max(left, place ?? 0));
        const visibility = place === null ? "hidden" : "visible";
        for (const [name, value] of Object.entries({ x1: at, x2: at, visibility })) guide.setAttribute(name, value);
      },
    };
  }

  /** A small chart: lines over the samples since a change. `lines` is a list of { name, values }. */
  function small(frame, { since, n, lines, low, high, marks, wanted }) {
    const width = frame.clientWidth, height = 150;
    const left = 34, right = width - 6, top = 8, bottom = height - 24;
    const most = since[since.length - 1];
    const x = (age) => left + ((right - left) * age) / most;
    const y = (value) => bottom - ((bottom - top) * (Math.max(low, Math.min(high, value)) - low)) / (high - low);
    const drawn = [];
    for (const [value, label] of marks) {
      drawn.push(
        svg("line", { x1: left, x2: right, y1: y(value), y2: y(value), class: value ? "x-grid" : "x-axis" }),
        svg("text", { x: left - 5, y: y(value) + 4, class: "x-tick x-end" }, label),
      );
    }
    for (const windows of [0, 1, 2]) {
      const at = x(windows * n);
      if (at > right) continue;
      drawn.push(
        svg("line", { x1: at, x2: at, y1: bottom, y2: bottom + 4, class: "x-axis" }),
        svg("text", { x: at, y: bottom + 17, class: "x-tick" }, ["now", "k later", "2k later"][windows]),
      );
    }
    for (const { name, values } of [...(wanted ? [{ name: "wanted", values: wanted }] : []), ...lines]) {
      const points = values.map((value, i) => [x(since[i]), y(value)]);
      drawn.push(svg("path", { d: line(points), class: `x-line x-${name}` }));
    }
    frame.replaceChildren(
      svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, ...drawn));
  }

  return { shown, small, weightAt, weights };
})();
