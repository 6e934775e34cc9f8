// The page: what is chosen in the controls is computed, drawn, told, and kept in the link.

(() => {
  "use strict";

  const { LIMITS, METHODS } = settings, { shown } = charts;
  const $ = (id) => document.getElementById(`x-${id}`);
  const commas = (n) => n.toLocaleString("en-US");

  let chosen = settings.fromHash(location.hash);
  let rules = settings.rules(chosen);

  // ---- fields: a slider and a box for the same number -------------------------------------------

  const log = { of: (value) => Math.log10(value) / 6, to: (place) => 10 ** (6 * place) };
  const FIELDS = {
    k: { ...log, round: (value) => Number(value.toPrecision(2)), step: 1 },
    c: {
      of: (value) => value, to: (place) => place, step: 0.01,
      round: (value) => Math.max(0.01, Math.round(100 * value) / 100),
    },
    atMost: { ...log, round: (value) => Number(value.toPrecision(2)), step: 1 },
    accumulators: { of: (value) => (value - 2) / 14, to: (place) => 2 + 14 * place, round: Math.round, step: 1 },
    t: { ...log, round: Math.round, step: 1 },
  };
  const PLACES = 6000; // of a slider

  const least = (name) => (name === "accumulators" ? METHODS[chosen.method].least ?? 2 : LIMITS[name][0]);
  const within = (name, value) => Math.min(LIMITS[name][1], Math.max(least(name), value));

  for (const [name, field] of Object.entries(FIELDS)) {
    const slider = $(`${name}-range`), box = $(name);
    Object.assign(slider, { min: 0, max: PLACES, step: 1 });
    slider.addEventListener("input", () =>
      choose({ [name]: within(name, Math.round(field.round(field.to(slider.value / PLACES)) * 1e6) / 1e6) }));
    slider.addEventListener("keydown", (event) => {
      const now = chosen[name], tenth = Math.max(field.step, Math.round(now / 10 / field.step) * field.step);
      const moves = {
        ArrowRight: now + field.step, ArrowUp: now + field.step, PageUp: now + tenth, End: LIMITS[name][1],
        ArrowLeft: now - field.step, ArrowDown: now - field.step, PageDown: now - tenth, Home: least(name),
      };
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      choose({ [name]: within(name, Math.round(moves[event.key] * 1e6) / 1e6) });
    });
    type(box, name);
  }
  type($("numbers"), "numbers");

  /** Let a number be typed into a box: taken if it makes sense, otherwise said why not. */
  function type(box, name) {
    box.addEventListener("input", () => {
      const none = name === "numbers" && !box.value.trim(); // that one may be left out
      const value = none ? null : settings.number(box.value.replaceAll(",", ""), name, least(name));
      const bad = value === null && !none;
      box.setAttribute("aria-invalid", bad);
      $("error").textContent = bad ? expected(name, box.value) : "";
      if (!bad) choose({ [name]: value }, box);
    });
    box.addEventListener("change", () => { // as it is left: what holds
      box.setAttribute("aria-invalid", false);
      $("error").textContent = "";
      showFields();
    });
    box.addEventListener("keydown", (event) => event.key === "Enter" && box.blur());
  }

  function expected(name, got) {
    const label = document.querySelector(`label[for="x-${name}"]`).firstChild.textContent;
    const kind = name === "c" ? "a fraction" : "a whole number";
    const range =
      name === "numbers" ? "from 1 to 1e15, such as 7e9" : `from ${least(name)} to ${commas(LIMITS[name][1])}`;
    return `${label}: expected ${kind} ${range}, got “${got.slice(0, 20)}”`;
  }

  for (const radio of document.querySelectorAll("#x-form [type=radio]"))
    radio.addEventListener("change", () => choose({ [radio.name]: radio.value }));
  $("form").addEventListener("submit", (event) => event.preventDefault());

  // ---- what is chosen ---------------------------------------------------------------------------

  /** Change some settings, and all that follows from them. `typing` is a box not to write into. */
  function choose(changes, typing = null) {
    const before = chosen;
    chosen = { ...chosen, ...changes };
    if (METHODS[chosen.method].tails && !settings.readable(chosen)) chosen.method = "anytime";
    const { blocks, tails, usual } = METHODS[chosen.method];
    if (blocks && tails !== METHODS[before.method].tails) chosen.accumulators = usual;
    const only = Object.keys(changes).every((name) => name === "t" || name === "numbers");
    if (!only) rules = settings.rules(chosen);
    show(typing);
    remember(only);
  }

  let pending = null, steps = true;

  /** Keep the settings in the link, once they rest; a new step alone makes no new entry to go back to. */
  function remember(only) {
    steps &&= only;
    clearTimeout(pending);
    pending = setTimeout(keep, 300);
  }

  function keep() {
    clearTimeout(pending);
    const hash = settings.toHash(chosen);
    if (hash !== location.hash) history[steps ? "replaceState" : "pushState"](null, "", hash);
    steps = true;
  }

  addEventListener("popstate", () => {
    if (location.hash && !location.hash.includes("=")) return; // a heading of this page
    play(false);
    clearTimeout(pending);
    steps = true;
    chosen = settings.fromHash(location.hash);
    rules = settings.rules(chosen);
    show();
  });

  // ---- show -------------------------------------------------------------------------------------

  let drawing = 0, settling = null;

  /** Show what is chosen: fields at once, figures with the next frame, the charts when it rests. */
  function show(typing = null) {
    showFields(typing);
    showLines();
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(draw);
    clearTimeout(settling);
    settling = setTimeout(settle, 150);
  }

  function showFields(typing = null) {
    for (const [name, field] of Object.entries(FIELDS)) {
      const slider = $(`${name}-range`), box = $(name), value = chosen[name];
      slider.value = Math.round(PLACES * field.of(value));
      slider.style.setProperty("--at", `${(100 * slider.value) / PLACES}%`);
      slider.setAttribute("aria-valuetext", commas(value));
      if (box !== typing) box.value = name === "c" ? value : commas(value);
    }
    if ($("numbers") !== typing) $("numbers").value = chosen.numbers === null ? "" : commas(chosen.numbers);
    const { kind, method } = chosen, { blocks } = METHODS[method];
    const used = { k: kind === "fixed", c: kind !== "fixed", atMost: kind === "capped", accumulators: blocks };
    for (const [name, is] of Object.entries(used)) document.querySelector(`[data-field=${name}]`).hidden = !is;
    for (const radio of document.querySelectorAll("#x-form [type=radio]"))
      radio.checked = chosen[radio.name] === radio.value;
    for (const radio of document.querySelectorAll("#x-form [name=method]"))
      radio.disabled = METHODS[radio.value].tails && !settings.readable(chosen);
    $("method-hint").textContent = {
      anytime: "A few blocks. The oldest is given up when the others hold the window.",
      paper: "As the paper turns blocks: greedily, so that large and small ones alternate.",
      anytail: "Blocks that cover the stream, read with any fraction. Neighbours are merged.",
      freshest: "The blocks of “every tail”, weighted for the least lag. A sample weighs less the older it is.",
      exponential: "One mean with a decay that follows t. It fades, and never forgets.",
      exact: "Keeps every sample of the window. The reference.",
    }[method] + (settings.readable(chosen) ? "" : " (“Every tail” needs “the last fraction”.)");
    $("previous").disabled = !blocks || chosen.t <= 1;
    $("next").disabled = !blocks || tailavg.closesAt(rules[method], chosen.t) >= LIMITS.t[1];
    document.querySelectorAll(".explorer").forEach((part) => (part.dataset.method = method));
  }

  let found = null; // what was computed for the step that is shown

  function compute() {
    const { t } = chosen;
    const of = Object.entries(rules).map(([name, rule]) => {
      const runs = tailavg.newestFirst(rule, t);
      return { name, rule, runs, profile: tailavg.profile(rule, t, runs) };
    });
    found = { t, all: of, main: of.find(({ name }) => name === chosen.method) };
    found.behind = of.filter((one) => one !== found.main);
  }

  function draw() {
    compute();
    const { main, behind, t } = found;
    found.drawn = [main, ...behind.filter(({ name }) => name === "exact" || name === "exponential")];
    found.figure = charts.weights($("weights"), {
      t, size: main.profile.size, blocks: blocksOf(main), chosen: main, behind: found.drawn.slice(1),
      caption: { exponential: "one mean of everything", exact: "samples held" }[main.name] ??
        "blocks, and how many samples each has",
    });
    showLegend();
    $("now").textContent = turnText(main);
    showTiles();
  }

  /** The lines of the figure, and what the sample of this age weighs in each. */
  function showLegend(age = null) {
    const weight = ({ runs }) => (age === null ? "" : ` <b>${shown(charts.weightAt(runs, age))}</b>`);
    const keys = found.drawn.map((one, i) =>
      `<span class="x-key x-${one.name}${i ? " x-faint" : ""}">${METHODS[one.name].title}${weight(one)}</span>`);
    const when = age ? `${commas(age)} ago` : "the newest";
    if (age !== null) keys.unshift(`<span>sample ${commas(found.t - age)}, ${when}:</span>`);
    $("legend").innerHTML = keys.join("");
  }

  for (const moved of ["pointermove", "pointerdown", "pointerleave"])
    $("weights").addEventListener(moved, (event) => {
      if (!found?.figure) return;
      const place = moved === "pointerleave" ? null : event.clientX - $("weights").getBoundingClientRect().left;
      found.figure.mark(place);
      showLegend(place === null ? null : found.figure.ageAt(place));
    });

  /** What the strip shows: the blocks, the samples held, or the one mean that fades. */
  function blocksOf({ rule, runs, name }) {
    const { t } = found;
    if (name === "exact") {
      const n = rule.samples(t);
      return [{ start: t - n, end: t, weight: 1 / n, label: commas(n) }];
    }
    if (name === "exponential") return [{ start: 0, end: t, weight: 1, label: commas(t), fades: true }];
    const starts = tailavg.startsAt(rule, t);
    return starts.map((start, i) => {
      const end = starts[i + 1] ?? t, weight = runs[starts.length - 1 - i]?.[1] ?? 0;
      return { start, end, weight, label: commas(end - start), open: end === t };
    });
  }

  function turnText({ rule, name }) {
    const { t } = chosen;
    if (name === "exponential")
      return `When sample ${commas(t)} came, it was joined with weight ${shown(1 - rule.decay(t))}.`;
    if (name === "exact") return `Samples held: ${commas(rule.samples(t))}, all of the same weight.`;
    const closes = tailavg.closesAt(rule, t), full = tailavg.startsAt(rule, t).length === rule.accumulators;
    if (closes > 1e15) return "The open block never closes: the window is all there is.";
    const gone = METHODS[name].tails ? "two neighbours are merged, and " : "the oldest is given up, and ";
    const then = `${full ? gone : ""}a new one opens.`;
    if (closes === t) return `The open block is full. With the next sample, ${then}`;
    const more = closes - t === 1 ? "one more sample" : `${commas(closes - t)} more samples`;
    return `The open block is full after ${more}. Then ${then}`;
  }

  const bytes = (size) => {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let unit = 0;
    for (; size >= 999.5 && unit < 5; unit++) size /= 1000;
    return `${Number(size.toPrecision(3)).toLocaleString("en-US")} ${units[unit]}`;
  };

  /** What is held, in arrays of the shape of a sample, as `tailavg profile` counts. */
  function memory({ name, profile }) {
    const plural = (n, what) => `${commas(n)} ${what}${n === 1 ? "" : "s"}`;
    const [hot, cold] = name === "exact" ? [profile.accumulators, 0] : [1, profile.accumulators];
    const size = (n) => (chosen.numbers === null ? "" : bytes(4 * chosen.numbers * n));
    return {
      hot: [size(hot), name === "exact" ? plural(hot, "sample") : "1 sum"],
      cold: [size(cold), cold ? plural(cold, "mean") : "nothing"],
    };
  }

  const noiseOf = ({ profile }) => 1 / Math.sqrt(profile.effectiveSize);

  const TILES = [
    ["size", "size of the window", "k, what was asked for", ({ profile }) => shown(profile.size)],
    ["effective", "effective size", "1 / Σα², what was got", ({ profile }) => shown(profile.effectiveSize)],
    ["mean", "mean age", "how far it lags", ({ profile }) => shown(profile.meanAge)],
    ["oldest", "oldest age", "how far it reaches back", ({ profile }) => commas(profile.oldestAge)],
    ["noise", "noise left", "of a standard deviation of 1", (one) => shown(noiseOf(one))],
    ["hot", "hot memory", "touched by every update", (one) => memory(one).hot],
    ["cold", "cold memory", "touched by folds and reads", (one) => memory(one).cold],
  ];

  function showTiles() {
    const { main, behind } = found;
    $("tiles-legend").innerHTML = `<span>Large: ${METHODS[main.name].title}. Small:</span>` +
      behind.map(({ name }) => `<span class="x-key x-${name}">${METHODS[name].title}</span>`).join("");
    $("tiles").innerHTML = TILES.map(([id, label, hint, get]) => {
      const [big, more] = [get(main)].flat(); // of memory: bytes, if they are known, and arrays
      const others = id === "size" ? [] : behind.map((one) => {
        const [first, second] = [get(one)].flat(), { title } = METHODS[one.name];
        return `<span class="x-key x-${one.name}"><span class="x-unseen">${title}: </span>${first || second}</span>`;
      });
      if (big && more) others.unshift(`<span class="x-more">${more}</span>`);
      return `<div class="x-tile"><dt>${label}<small>${hint}</small></dt>` +
        `<dd data-stat="${id}">${big || more}</dd><dd class="x-others">${others.join("")}</dd></div>`;
    }).join("");
  }

  const percent = (x) => `${shown(Math.round(1000 * x) / 10)} %`;

  const RESPONSES = [
    { id: "step", title: "A step", low: -0.05, high: 1.1, marks: [[0, "0"], [1, "1"]],
      hint: "The stream jumps by 1. Followed after k samples:",
      of: (_, averages, at) => percent(averages.step[at(1)]) },
    { id: "drift", title: "A drift", low: -0.1, high: 2.6, marks: [[0, "0"], [1, "1"], [2, "2"]],
      hint: "The stream rises by 1 every k samples. Mean age, the lag:",
      of: ({ profile }) => shown(profile.meanAge) },
    { id: "outlier", title: "One bad sample", low: -0.1, high: 2.3, marks: [[0, "0"], [1, "1/k"], [2, "2/k"]],
      hint: "What it weighs. Of 1/k, there is left after 2k samples:",
      of: (_, averages, at) => percent(averages.outlier[at(2)]) },
    { id: "noise", title: "Noise", low: -3.2, high: 3.2, marks: [[-2, "−2σ"], [0, "0"], [2, "2σ"]],
      hint: "Of noise with a standard deviation of 1 is left, σ:",
      of: (one) => shown(noiseOf(one)) },
  ];

  $("responses").innerHTML = RESPONSES.map(({ id, title, hint }) =>
    `<section class="x-card" aria-labelledby="x-${id}-title"><h3 id="x-${id}-title">${title}</h3>` +
    `<div class="x-figure" id="x-${id}"></div>` +
    `<p class="x-hint">${hint}</p><p class="x-legend" id="x-${id}-values"></p></section>`).join("");

  /** When the settings rest: the charts, and the sentence for those who do not see them. */
  function settle() {
    if (!found || found.t !== chosen.t || found.main?.rule !== rules[chosen.method]) compute();
    const { all, main, t } = found;
    const got = signals.responses(all.map(({ rule }) => rule), main.rule.window, t);
    for (const { id, low, high, marks, of } of RESPONSES) {
      const scale = id === "noise" ? Math.sqrt(got.n) : 1;
      const lines = all.map(({ name }, i) => ({ name, values: got.averages[i][id].map((value) => value * scale) }));
      lines.sort((a, b) => (a.name === chosen.method) - (b.name === chosen.method)); // on top
      const top = Math.max(high, ...(got.inputs[id] ?? []));
      charts.small($(id), { since: got.since, n: got.n, lines, low, high: top, marks, wanted: got.inputs[id] });
      $(`${id}-values`).innerHTML = all.map((one, i) => {
        const value = of(one, got.averages[i], got.at);
        return `<span class="x-key x-${one.name}">${METHODS[one.name].short} <b>${value}</b></span>`;
      }).join("");
    }
    if (playing) return;
    const { size, effectiveSize, meanAge, oldestAge } = main.profile;
    const { title, blocks } = METHODS[main.name], sizes = blocksOf(main).map(({ label }) => label);
    $("live").textContent =
      `Step ${commas(t)}, ${title}, a window of ${shown(size)}: effective size ${shown(effectiveSize)}, ` +
      `mean age ${shown(meanAge)}, oldest age ${commas(oldestAge)}. ` +
      (blocks ? `Blocks of ${sizes.join(", ")} samples. ` : "") + turnText(main);
  }

  const LANGUAGES = { python: "Python", torch: "PyTorch", optax: "JAX and optax", shell: "Shell" };

  $("lines").innerHTML = Object.entries(LANGUAGES).map(([id, title]) =>
    `<section class="x-code" aria-labelledby="x-${id}-name"><h3 id="x-${id}-name">${title}</h3>` +
    `<div class="x-snippet"><code id="x-${id}-code"></code>` +
    `<button type="button" id="x-${id}-copy" aria-label="Copy the lines for ${title}">Copy</button></div>` +
    `<p class="x-hint" id="x-${id}-note"></p></section>`).join("");

  function showLines() {
    for (const [id, { code, note }] of Object.entries(settings.lines(chosen))) {
      $(`${id}-code`).textContent = code ?? "";
      $(`${id}-code`).parentElement.hidden = !code;
      $(`${id}-note`).textContent = note ?? "";
    }
  }

  // ---- buttons ----------------------------------------------------------------------------------

  async function copy(text, button) {
    const label = (button.dataset.label ??= button.textContent);
    try {
      await navigator.clipboard.writeText(text);
    } catch { // not allowed, as in some browsers for a file
      const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = label), 1500);
  }

  for (const id of Object.keys(LANGUAGES))
    $(`${id}-copy`).addEventListener("click", () => copy($(`${id}-code`).textContent, $(`${id}-copy`)));
  $("link").addEventListener("click", () => {
    keep();
    copy(location.href, $("link"));
  });

  const rule = () => rules[chosen.method];
  $("next").addEventListener("click", () => choose({ t: within("t", tailavg.closesAt(rule(), chosen.t) + 1) }));
  $("previous").addEventListener("click", () => {
    const starts = tailavg.startsAt(rule(), Math.max(1, chosen.t - 1));
    choose({ t: starts[starts.length - 1] + 1 });
  });

  let playing = 0;

  /** Move through the stream: a window in about eight seconds. */
  function play(on) {
    cancelAnimationFrame(playing);
    playing = 0;
    $("play").setAttribute("aria-pressed", on);
    $("play").textContent = on ? "Pause" : "Play";
    if (!on) return;
    let last = performance.now(), due = 0;
    playing = requestAnimationFrame(function frame(now) {
      const pace = Math.max(3, Math.min(rules.exact.window.size(chosen.t), chosen.t) / 8); // samples a second
      due += (pace * Math.min(100, now - last)) / 1000;
      last = now;
      playing = requestAnimationFrame(frame);
      if (due >= 1) {
        choose({ t: within("t", chosen.t + Math.floor(due)) });
        due %= 1;
      }
      if (chosen.t >= LIMITS.t[1]) play(false);
    });
  }

  $("play").addEventListener("click", () => {
    play(!playing);
    if (!playing) settle();
  });

  new ResizeObserver(() => show()).observe($("weights"));
  show();
})();
