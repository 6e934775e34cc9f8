// How averages follow a stream that changes after step t: a step, a drift, one bad sample, noise.

const signals = (() => {
  "use strict";

  const POINTS = 200; // steps at which a chart has a value
  const REACH = 2.5; // a chart goes on for so many windows

  /** A number from a normal distribution, always the same one for the same place. */
  function normal(place) {
    const uniform = (seed) => {
      let x = (seed + 0x9e3779b9) | 0; // then the last steps of MurmurHash3, which spread every bit
      x = Math.imul(x ^ (x >>> 16), 0x85ebca6b);
      x = Math.imul(x ^ (x >>> 13), 0xc2b2ae35);
      return (((x ^ (x >>> 16)) >>> 0) + 0.5) / 2 ** 32;
    };
    const seed = 2 * (place + 1e6);
    const radius = Math.sqrt(-2 * Math.log(uniform(seed)));
    return radius * Math.cos(2 * Math.PI * uniform(seed + 1));
  }

  /** The total of noise of variance 1 that begins at step `from`; in a long one, runs of samples are alike. */
  function noise(from, to, n) {
    const width = 2 ** Math.max(0, Math.ceil(Math.log2(n / 128)));
    const first = Math.floor(from / width), cells = Math.ceil(to / width) - first + 1;
    const values = new Float64Array(cells), totals = new Float64Array(cells + 1);
    for (let cell = 0; cell < cells; cell++) {
      values[cell] = normal(first + cell) / Math.sqrt(width);
      totals[cell + 1] = totals[cell] + values[cell] * width;
    }
    return (i) => {
      const cell = Math.max(0, Math.floor(i / width) - first);
      return i / width <= first ? 0 : totals[cell] + values[cell] * (i - (first + cell) * width);
    };
  }

  /** Each signal, by the total of its samples up to i. It is 0 up to step t, but for the noise. */
  function after(t, n, horizon) {
    const since = (i) => Math.max(0, i - t);
    return {
      step: since,
      drift: (i) => (since(i) * (since(i) + 1)) / 2 / n,
      outlier: (i) => (i > t ? n : 0),
      noise: noise(Math.max(0, t - 3 * n), t + horizon, n),
    };
  }

  /** The averages of all signals by one rule: { step: [...], drift: [...], … } at these steps. */
  function follow(rule, t, steps, inputs, stride) {
    const found = Object.fromEntries(Object.keys(inputs).map((name) => [name, []]));
    if (rule instanceof tailavg.Exponential) {
      const now = Object.fromEntries(Object.keys(inputs).map((name) => [name, 0]));
      let i = Math.max(0, t - 2 * (steps[steps.length - 1] - t));
      for (const step of steps) {
        while (i < step) {
          // some samples of a long window at once: their decays are hardly different
          const many = Math.min(Math.max(1, Math.floor(stride)), (i < t ? t : step) - i);
          const decay = rule.decay(i + (many + 1) / 2) ** many;
          for (const name in inputs) {
            const mean = (inputs[name](i + many) - inputs[name](i)) / many;
            now[name] = decay * now[name] + (1 - decay) * mean;
          }
          i += many;
        }
        for (const name in inputs) found[name].push(now[name]);
      }
      return found;
    }
    for (const step of steps) {
      const runs = tailavg.newestFirst(rule, step);
      for (const name in inputs) {
        let end = step, average = 0;
        for (const [size, weight] of runs) {
          average += weight * (inputs[name](end) - inputs[name](end - size));
          end -= size;
        }
        found[name].push(average);
      }
    }
    return found;
  }

  /** What the charts show after step t: the steps since, the signals there, an average per rule. */
  function responses(rules, window, t) {
    const n = Math.max(1, Math.round(Math.min(window.size(t), t)));
    const horizon = Math.max(5, Math.round(REACH * n));
    const points = Math.min(POINTS, horizon);
    const steps = Array.from({ length: points + 1 }, (_, i) => t + Math.round((i * horizon) / points));
    const inputs = after(t, n, horizon);
    return {
      n,
      since: steps.map((step) => step - t),
      inputs: {
        step: steps.map((step) => (step > t ? 1 : 0)),
        drift: steps.map((step) => (step - t) / n),
      },
      averages: rules.map((rule) => follow(rule, t, steps, inputs, n / 4000)),
      at: (windows) => steps.findIndex((step) => step >= t + windows * n),
    };
  }

  return { responses };
})();
