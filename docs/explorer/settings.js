// What the user has chosen: as a link, as rules, and as lines of code that do the same.

const settings = (() => {
  "use strict";

  const MOST = 1e6; // samples, in a window or a stream

  // blocks: has accumulators, at least `least`, by default `usual`; tails: an AnyTail, read with fractions only
  const METHODS = {
    anytime: { title: "anytime window", short: "anytime", blocks: true, least: 2, usual: 3 },
    paper: { title: "anytime, paper’s turns", short: "paper’s turns", blocks: true, least: 2, usual: 3 },
    anytail: { title: "every tail", short: "every tail", blocks: true, tails: true, least: 6, usual: 12 },
    freshest: { title: "every tail, freshest", short: "freshest", blocks: true, tails: true, least: 6, usual: 12 },
    exponential: { title: "exponential", short: "exponential", blocks: false },
    exact: { title: "exact window", short: "exact", blocks: false },
  };

  const LIMITS = {
    k: [1, MOST], c: [0.001, 1], atMost: [1, MOST], accumulators: [2, 16], t: [1, MOST], numbers: [1, 1e15],
  };

  const DEFAULTS = {
    kind: "growing", k: 200, c: 0.25, atMost: 1000, method: "anytime", accumulators: 3, t: 1150,
    numbers: null,
  };

  /** A number that somebody typed, if it is one that the setting of this name admits; else null. */
  function number(text, name, least = LIMITS[name][0]) {
    const value = /^\d*\.?\d+(e\+?\d+)?$/i.test(text.trim()) ? Number(text) : NaN;
    const fits = value >= least && value <= LIMITS[name][1];
    return fits && (name === "c" || Number.isInteger(value)) ? value : null;
  }

  /** A window as the command line writes it: 200 is the last 200, 0.25 the last quarter, 1.0 all. */
  const fraction = (c) => (c === 1 ? "1.0" : String(c));
  const windowText = ({ kind, k, c }) => (kind === "fixed" ? String(k) : fraction(c));

  function toHash(chosen) {
    const { kind, atMost, method, accumulators, t, numbers } = chosen;
    const parts = [["window", windowText(chosen)]];
    if (kind === "capped") parts.push(["at_most", atMost]);
    parts.push(["method", method]);
    if (METHODS[method].blocks) parts.push(["accumulators", accumulators]);
    parts.push(["t", t]);
    if (numbers !== null) parts.push(["numbers", numbers]);
    return "#" + parts.map((pair) => pair.join("=")).join("&");
  }

  /** The settings of a link; what it does not say, or not in a way that makes sense, is as usual. */
  function fromHash(hash) {
    const given = new URLSearchParams(hash.slice(1)), chosen = { ...DEFAULTS };
    const take = (name, key, least) => {
      const value = given.has(key) ? number(given.get(key), name, least) : null;
      if (value !== null) chosen[name] = value;
      return value !== null;
    };
    if (/^\d+$/.test(given.get("window") ?? "")) {
      if (take("k", "window")) chosen.kind = "fixed";
    } else if (take("c", "window") && given.has("at_most")) {
      if (take("atMost", "at_most")) chosen.kind = "capped";
    }
    const method = given.get("method");
    if (Object.hasOwn(METHODS, method ?? "") && (!METHODS[method].tails || readable(chosen)))
      chosen.method = method;
    chosen.accumulators = METHODS[chosen.method].usual ?? DEFAULTS.accumulators;
    take("accumulators", "accumulators", METHODS[chosen.method].least);
    take("t", "t");
    take("numbers", "numbers");
    return chosen;
  }

  /** Whether an AnyTail can be read with the window at any step: it is a fraction of the stream. */
  const readable = ({ kind }) => kind === "growing";

  /** The shortest tail of the AnyTail: 0.1, as usual, unless a shorter one is to be read. */
  const shortest = ({ c }) => Math.min(0.1, c);

  /** The rules to compare: one of blocks, the exponential, the exact window. */
  function rules(chosen) {
    const { kind, k, c, atMost, method, accumulators } = chosen;
    const window =
      kind === "fixed" ? new tailavg.Fixed(k) : new tailavg.Growing(c, kind === "capped" ? atMost : Infinity);
    const reading = method === "freshest" ? tailavg.freshest : tailavg.read;
    const blocks =
      METHODS[method].tails
        ? new tailavg.AnyTail(window, accumulators, shortest(chosen), reading)
        : new tailavg.AnytimeWindow(window, accumulators, method === "paper" ? "paper" : "balanced");
    return {
      [METHODS[method].blocks ? method : "anytime"]: blocks,
      exponential: new tailavg.Exponential(window),
      exact: new tailavg.ExactWindow(window),
    };
  }

  /** Python's way to write a whole number. */
  const whole = (n) => (n < 10000 ? String(n) : n.toLocaleString("en-US").replaceAll(",", "_"));

  /** The rule as Python writes it, and the names to import for it. */
  function python(chosen) {
    const { kind, k, c, atMost, method, accumulators } = chosen;
    const names = [];
    let window = kind === "fixed" ? whole(k) : fraction(c);
    if (kind === "capped") {
      names.push("Growing");
      window = `Growing(${window}, at_most=${whole(atMost)})`;
    }
    const { usual } = METHODS[method], count = accumulators === usual ? "" : `accumulators=${accumulators}`;
    const call = (name, ...given) => {
      names.unshift(name);
      return `${name}(${given.filter(Boolean).join(", ")})`;
    };
    if (method === "exponential") return { rule: call("Exponential", window), names };
    if (method === "exact") return { rule: call("ExactWindow", window), names };
    if (method === "paper") return { rule: call("AnytimeWindow", window, count, 'turns="paper"'), names };
    if (METHODS[method].tails) {
      if (method === "freshest") names.push("Freshest");
      const least = shortest(chosen);
      return { rule: call("AnyTail", count, least === 0.1 ? "" : `shortest=${fraction(least)}`), names };
    }
    return count ? { rule: call("AnytimeWindow", window, count), names } : { rule: window, names };
  }

  /** What to copy, by language: { code, note }; without a code there is no way to do it. */
  function lines(chosen) {
    const { kind, c, atMost, method, accumulators } = chosen, { rule, names } = python(chosen);
    const imports = (...more) => `from tailavg import ${[...names, ...more].sort().join(", ")}\n`;
    const others = names.length ? imports() : "";
    const { tails } = METHODS[method];
    const reading = method === "freshest" ? `Freshest(${fraction(c)})` : fraction(c); // of an AnyTail
    const samples = { note: "An exact window holds every sample: too many for the weights of a model." };
    const read = tails ? `window=${reading}` : "";
    return {
      python: {
        code: `${imports("TailAverage")}average = TailAverage(${rule})`,
        note: "Then average.update(x) for each sample; at any time average.value(" +
          (tails ? `${reading}), or of another fraction from ${fraction(shortest(chosen))} on.` : ")."),
      },
      torch: method === "exact" ? samples : {
        code: `${others}from tailavg.torch import ParameterAverage\naverage = ParameterAverage(model, ${rule})`,
        note: `Then average.attach(optimizer); average.average_parameters(${read}) to evaluate.`,
      },
      optax: method === "exact" ? samples : {
        code: `${others}from tailavg.optax import averaged_params, with_tail_average\ntx = with_tail_average(optax.adam(1e-3), ${rule})`,
        note: `Then averaged_params(opt_state, params${read && ", " + read}) to evaluate.`,
      },
      shell: shell(),
    };

    function shell() {
      if (method === "paper" && kind !== "fixed")
        return { note: "The command line has balanced turns only. Use Python for the paper's." };
      const usual = accumulators === METHODS[method].usual || !METHODS[method].blocks;
      const count = usual ? "" : ` --accumulators ${accumulators}`;
      const least = shortest(chosen);
      if (method === "anytail") {
        const all = least === c ? [c] : [least, c];
        return {
          code: `tailavg stream --windows ${all.map(fraction).join(",")}${count} log.txt`,
          note: all.length > 1 ? "One column for each window; the shortest comes first." : "",
        };
      }
      const cap = kind === "capped" ? ` --at-most ${atMost}` : "";
      const how = ["exponential", "exact", "freshest"].includes(method) ? ` --method ${method}` : "";
      const notes = { paper: "For a fixed window, both kinds of turns are the same." };
      if (method === "freshest" && least < c && c < 1) // the weights of all samples do not depend on blocks
        notes.freshest =
          `The blocks of this command suit ${c} alone; those of this page suit all fractions from ${least} on. The averages ` +
          `differ slightly. With --windows ${least},${c} instead of --window ${c}, the last column is the average of this page.`;
      return {
        code: `tailavg stream --window ${windowText(chosen)}${cap}${how}${count} log.txt`,
        note: notes[method] ?? "One number per line in, one average out.",
      };
    }
  }

  return { DEFAULTS, LIMITS, METHODS, fromHash, lines, number, readable, rules, toHash };
})();
