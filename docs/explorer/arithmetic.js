// The arithmetic of the explorer: windows, the equation, rules, blocks, weights and their summary.
//
// It is the library's, once more, in the order of src/tailavg/core: windows.py, equation.py,
// rules.py, clock.py, profile.py. Steps at which blocks turn are whole-number arithmetic, as there,
// and tests/site hold both to the same turns and the same weights.

const tailavg = (() => {
  "use strict";

  // windows.py ------------------------------------------------------------------------------------

  const BITS = 60n; // of the ratio by which steps are stretched
  const NEVER = 2n ** 63n - 1n;
  const TIES = 10n ** 12n; // a count reaches what it misses by a TIES-th of it: 7 reaches 0.07 * 100
  const TIE = 1e-12;

  const ceilDivide = (a, b) => (a + b - 1n) / b;

  /** A number as a fraction of whole ones, exactly: [numerator, denominator]. */
  function exactly(x) {
    let under = 1n;
    for (; !Number.isInteger(x); x *= 2) under *= 2n;
    return [BigInt(x), under];
  }

  /** The fraction closest to p/q whose denominator is at most `most`. */
  function closest([p, q], most) {
    if (q <= most) return [p, q];
    let [before, last] = [[0n, 1n], [1n, 0n]]; // convergents of the continued fraction
    let [n, d] = [p, q];
    for (;;) {
      const a = n / d;
      if (before[1] + a * last[1] > most) break;
      [before, last] = [last, [before[0] + a * last[0], before[1] + a * last[1]]];
      [n, d] = [d, n - a * d];
    }
    const a = (most - before[1]) / last[1];
    const between = [before[0] + a * last[0], before[1] + a * last[1]];
    return 2n * d * between[1] <= q ? last : between;
  }

  /** c as a fraction: one of small numbers, if it gives c to the last digit. */
  function fraction(c) {
    const [p, q] = closest(exactly(c), 10n ** 6n);
    const alike = Math.abs(Number(p) / Number(q) - c) <= 2 ** -52 * c && (p < q || c === 1);
    return alike ? [p, q] : exactly(c);
  }

  /** t / start, times 2⁶⁰, where the samples between them are a `parts`-th of a growing window. */
  function stretch(c, parts) {
    if (c === 1) return NEVER << BITS;
    let share = fraction(c);
    let rest = [share[1] - share[0], share[1]];
    if (parts > 1) { // irrational: whichever is smaller keeps its digits
      const part = -Math.expm1(Math.log1p(-c) / parts);
      const whole = Number(rest[0]) / Number(rest[1]);
      share = exactly(part);
      rest = part < 0.5 ? [share[1] - share[0], share[1]] : exactly(whole ** (1 / parts));
    }
    const [a, b] = rest, [s, u] = share; // 2⁶⁰ / (rest + share / TIES), rounded down
    return ((1n << BITS) * b * u * TIES) / (a * u * TIES + s * b);
  }

  /** The last k samples. */
  class Fixed {
    constructor(k) {
      this.k = k;
      this.steadyFrom = k;
    }

    size() {
      return this.k;
    }

    growth() {
      return 0;
    }

    /** The first step at which the samples after `start` make a `parts`-th of the window. */
    filledAt(start, parts = 1) {
      return start + Math.ceil(this.k / parts);
    }
  }

  /** The last fraction c of all samples so far, but no more than `atMost` of them. */
  class Growing {
    constructor(c, atMost = Infinity) {
      this.c = c;
      this.most = atMost;
      const [p, q] = fraction(c);
      this.exact = q <= 10n ** 6n;
      [this.over, this.under] = this.exact ? [Number(p), Number(q)] : [c, 1];
      this.steadyFrom = Infinity;
      if (atMost < Infinity) { // from here on it is a fixed one
        const cap = BigInt(atMost) * (this.exact ? TIES : TIES - 1n);
        this.steadyFrom = Math.max(1, Number(ceilDivide(cap * q, TIES * p)));
      }
      this.ratios = new Map(); // by parts
    }

    size(t) {
      let k = (this.over * t) / this.under;
      if (!this.exact && Math.abs(Math.round(k) - k) <= TIE * k) k = Math.round(k);
      return Math.min(Math.max(k, 1), this.most);
    }

    /** k_t - k_{t-1}, of these two. */
    growth(k, before) {
      return before > 1 && k < this.most ? this.c : k - before;
    }

    /** As of `Fixed`. Growing, it is shared out in equal ratios, not sizes. */
    filledAt(start, parts = 1) {
      if (start + 1 < this.steadyFrom) {
        if (!this.ratios.has(parts)) this.ratios.set(parts, stretch(this.c, parts));
        const stretched = BigInt(start) * this.ratios.get(parts) + (1n << BITS) - 1n;
        const growing = Math.max(start + 1, Number(stretched >> BITS));
        if (growing < this.steadyFrom) return growing;
      }
      return Math.max(start + Math.ceil(this.most / parts), this.steadyFrom);
    }
  }

  // equation.py -----------------------------------------------------------------------------------

  /** The smaller root g of g²/old + (1-g)²/new = 1/k, where k = old + new - excess. */
  function root(old, fresh, excess) {
    const total = old + fresh;
    return (old - Math.sqrt((old * fresh * excess) / (total - excess))) / total;
  }

  /** The weight of a mean of `old` samples beside a mean of `fresh` ones, for any counts. */
  function join(old, fresh, k) {
    return fresh < k ? Math.abs(root(old, fresh, Math.max(0, old + fresh - k))) : 0;
  }

  /** The weights of the means of consecutive blocks, oldest first: a fold of `join`. */
  function read(sizes, k) {
    let weights = [], newer = 0;
    for (const size of [...sizes].reverse()) {
      const g = join(size, newer, k);
      weights = [g, ...weights.map((weight) => weight * (1 - g))];
      newer += size;
    }
    return weights;
  }

  /** The weights of consecutive blocks, oldest first, that have the variance of k samples and the
   * least mean age.
   *
   * Block b has n_b of N samples, whose mean age is a_b. Its weight is n_b / N · (1 + (N / 2 - a_b) · s)
   * with s² = (N - k) / (k V), where V is the variance of the a_b. The oldest blocks are left out
   * while their weight would be negative. 12 N V is the sum of 3 · older · newer · n_b, where `newer`
   * and `older` are the ages at which block b ends and begins.
   */
  function freshest(sizes, k) {
    const slope = (samples, spread) =>
      Math.sqrt(((3 * samples) / Math.max(spread, 1)) * (Math.max(0, samples - k) / k));
    let newer = 0, spread = 0, kept = { samples: 0, spread: 0 };
    const blocks = [...sizes].reverse().map((size) => { // the newest first
      const block = { size, newer, older: newer + size };
      spread += 3 * block.older * newer * size;
      // the oldest block of these has a weight of at least 0
      if (newer * slope(block.older, spread) <= 1) kept = { samples: block.older, spread };
      newer = block.older;
      return block;
    });
    const { samples } = kept, tilt = slope(samples, kept.spread);
    const weight = ({ size, newer, older }) =>
      older > samples ? 0 : Math.max(0, (size / samples) * (1 + (samples - older - newer) * tilt));
    return blocks.map(weight).reverse();
  }

  // rules.py --------------------------------------------------------------------------------------

  /** A few blocks; the oldest is given up. `starts` has one for each accumulator, empty ones at 0. */
  class AnytimeWindow {
    constructor(window, accumulators = 3, turns = "balanced") {
      Object.assign(this, { window, accumulators, turns });
    }

    /** The step after which the open block takes no more samples. */
    closes(starts) {
      const { window, accumulators } = this, last = starts[accumulators - 1];
      const greedy = window instanceof Growing && this.turns === "paper";
      const end = greedy ? last + 1 : window.filledAt(last, accumulators - 1);
      if (window instanceof Fixed || starts[0] === starts[1]) return end; // none is lost
      return Math.max(end, window.filledAt(starts[1]));
    }

    /** The blocks after the open one was closed at step t. */
    opened(starts, t) {
      return [...starts.slice(1), t];
    }
  }

  /** Blocks that cover the whole stream; neighbours are merged. A read has any `window`, and the
   * weights of `reading`: `read` or `freshest`. */
  class AnyTail {
    constructor(window, accumulators = 12, shortest = 0.1, reading = read) {
      Object.assign(this, { window, accumulators, shortest, reading });
      const best = (0.3 + (2 * Math.log(1 / shortest)) / (1 - shortest)) / (accumulators - 1);
      const thousandths = Math.max(1, Math.min(1000, Math.round(1000 * best)));
      [this.p, this.q] = fraction(shortest);
      this.share = [BigInt(thousandths) * this.p, 1000n * this.q];
    }

    closes(starts) {
      const last = starts[starts.length - 1];
      if (starts[0] === starts[1]) return last + 1; // one is empty
      const [share, whole] = this.share;
      return Math.max(last + 1, Number(ceilDivide(BigInt(last) * whole, whole - share)));
    }

    opened(starts, t) {
      const gone = starts[0] === starts[1] ? 0 : this.merged(starts, t);
      return [...starts.slice(0, gone), ...starts.slice(gone + 1), t];
    }

    /** The block that is merged with the one before it: the two smallest against those since. */
    merged(starts, t) {
      const { p, q } = this, ends = [...starts.slice(2), t];
      let best = 0, least = 1n, since = 0n;
      ends.forEach((end, i) => {
        const size = BigInt(end - starts[i]);
        const newer = (q - p) * BigInt(t - end), later = p * BigInt(end);
        const after = newer > later ? newer : later;
        if (size * since < least * after) [best, least, since] = [i + 1, size, after];
      });
      return best;
    }
  }

  /** An exponential average that has the variance of k_t samples at every step. */
  class Exponential {
    constructor(window) {
      this.window = window;
      this.accumulators = 1;
    }

    /** The weight of the average so far when sample t = 1, 2, … comes; of k_t and k_{t-1}. */
    decay(t, k = this.window.size(t), before = this.window.size(t - 1)) {
      const excess = t - 1 >= before ? 1 - this.window.growth(k, before) : 0;
      return Math.abs(root(Math.min(t - 1, before), 1, excess));
    }
  }

  /** The true average of the last ⌈k_t⌉ samples. */
  class ExactWindow {
    constructor(window) {
      this.window = window;
    }

    samples(t) {
      return Math.min(t, Math.ceil(this.window.size(t)));
    }
  }

  // clock.py --------------------------------------------------------------------------------------

  const SAVED = 64; // every so many turns the blocks are kept, to go on from there

  /** The blocks of a rule at any step, and when they change. */
  class Clock {
    constructor(rule) {
      this.rule = rule;
      this.saved = [new Array(rule.accumulators).fill(0)];
    }

    /** The start of each block after t samples, empty ones at 0, and when the open one closes. */
    at(t) {
      const last = this.rule.accumulators - 1;
      const from = Math.max(0, this.saved.findLastIndex((starts) => starts[last] < t));
      let starts = this.saved[from], closes = this.rule.closes(starts);
      for (let turn = from * SAVED + 1; closes < t; turn++) {
        starts = this.rule.opened(starts, closes);
        closes = this.rule.closes(starts);
        if (turn === this.saved.length * SAVED) this.saved.push(starts);
      }
      return { starts, closes };
    }

    /** The start of each block that has samples. */
    starts(t) {
      const { starts } = this.at(t);
      return starts.filter((start, i) => start < (starts[i + 1] ?? t));
    }
  }

  const clocks = new Map(); // of the rules that were asked for last

  /** The start of each block of a rule after t samples, oldest first. */
  function startsAt(rule, t) {
    return clockOf(rule).starts(t);
  }

  /** The step after which the open block of a rule is closed. */
  function closesAt(rule, t) {
    return clockOf(rule).at(t).closes;
  }

  function clockOf(rule) {
    if (!clocks.has(rule)) {
      if (clocks.size >= 8) clocks.delete(clocks.keys().next().value);
      clocks.set(rule, new Clock(rule));
    }
    return clocks.get(rule);
  }

  // profile.py ------------------------------------------------------------------------------------

  const CHUNK = 65536; // of decays, multiplied up as the library does: the smallest weights agree

  /** The weights of an exponential, newest first, as far as they are not 0. */
  function faded(rule, t) {
    const weights = new Float64Array(t);
    let length = 0, kept = 1; // the weight of everything up to step t
    let k = rule.window.size(t);
    while (t > 0 && kept > 0) {
      let product = 1, left = kept;
      const end = Math.max(0, t - CHUNK), from = length;
      for (let age = from; t > end; t--, age++) {
        const before = rule.window.size(t - 1), decay = rule.decay(t, k, before);
        k = before;
        weights[age] = (1 - decay) * left;
        if (weights[age] > 0) length = age + 1;
        product *= decay;
        left = kept * product;
      }
      if (length === from) break; // all that is left is too little for a float
      kept = left;
    }
    return weights.subarray(0, length);
  }

  /** Runs of samples, from the newest to the oldest with a weight: [size, weight or weights]. */
  function newestFirst(rule, t) {
    if (rule instanceof Exponential) {
      const weights = faded(rule, t);
      return [[weights.length, weights]];
    }
    if (rule instanceof ExactWindow) return [[rule.samples(t), 1 / rule.samples(t)]];
    const starts = startsAt(rule, t);
    const sizes = starts.map((start, i) => (starts[i + 1] ?? t) - start);
    const reading = rule instanceof AnyTail ? rule.reading : read;
    const weights = reading(sizes, rule.window.size(t));
    const first = weights.findIndex((weight) => weight > 0);
    return sizes.map((size, i) => [size, weights[i] / size]).slice(first).reverse();
  }

  /** How an average weighs its samples at step t. Ages count from 0, the newest sample. */
  function profile(rule, t, runs = newestFirst(rule, t)) {
    let squares = 0, ages = 0, age = 0;
    for (const [size, run] of runs) {
      if (typeof run === "number") {
        squares += size * run ** 2;
        ages += size * run * (age + (size - 1) / 2);
        age += size;
      } else {
        for (const weight of run) {
          squares += weight ** 2;
          ages += weight * age++;
        }
      }
    }
    return {
      count: t,
      size: rule.window.size(t),
      effectiveSize: 1 / squares,
      meanAge: ages,
      oldestAge: age - 1,
      accumulators: rule instanceof ExactWindow ? rule.samples(t) : rule.accumulators,
    };
  }

  return {
    AnyTail, AnytimeWindow, ExactWindow, Exponential, Fixed, Growing,
    closesAt, freshest, newestFirst, profile, read, startsAt,
  };
})();
