// Small charts of what was logged.

const SVG = 'http://www.w3.org/2000/svg';

function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// title, unit, series as [label, name of the metric], band as two names. A chart shows the series that were logged.
const CHARTS = [
  ['Reward', '', [['training', 'reward'], ['evaluation', 'eval_reward']]],
  ['Groups with a success', 'share', [['groups', 'self_distillation/success_group_fraction'], ['evaluation', 'eval_self_distillation/success_group_fraction']]],
  ['Attempts that were taught', 'share', [['taught', 'self_distillation/reprompt_sample_fraction'], ['feedback', 'self_distillation/feedback_used_fraction']]],
  ['Credit', 'nats, with the middle 90\u202f%', [['mean', 'credit/mean']], ['credit/q05', 'credit/q95']],
  ['Distillation loss', 'nats', [['training', 'self_distillation/distillation_loss'], ['evaluation', 'eval_self_distillation/distillation_loss']]],
  ['Policy loss', '', [['training', 'self_distillation/policy_loss'], ['evaluation', 'eval_self_distillation/policy_loss']]],
  ['Entropy of the student', 'nats', [['training', 'entropy'], ['evaluation', 'eval_entropy']]],
  ['Completion length', 'tokens', [['mean', 'completions/mean_length']], ['completions/min_length', 'completions/max_length']],
];
const NOT_CURVES = /^(epoch|train_.*|total_flos|num_input_tokens_seen|eval_runtime|eval_.*_per_second)$/;

function niceTicks(low, high) {
  const span = high - low || Math.abs(high) || 1;
  const raw = span / 2;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const first = Math.floor(low / size + 1e-9) * size;
  const ticks = [];
  for (let tick = first; tick < high + size * 0.999 && ticks.length < 6; tick += size) ticks.push(+tick.toPrecision(12));
  return ticks.length < 2 ? [low, low + size] : ticks;
}

/** An average that follows the points, for runs whose curves are noise at first sight. */
function smoothed(points) {
  let mean = 0, weight = 0;
  const rate = 2 / (1 + Math.max(5, points.length / 20));
  return points.map(([x, y]) => {
    mean += rate * (y - mean);
    weight += rate * (1 - weight);
    return [x, mean / weight];
  });
}

function chart(title, unit, series, band) {
  const width = 300, height = 128, left = 44, right = 10, top = 8, bottom = 20;
  const all = [...series.flatMap(([, points]) => points), ...(band ? band.flat() : [])];
  const xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const ticks = niceTicks(Math.min(...ys), Math.max(...ys));
  const [y0, y1] = [ticks[0], ticks[ticks.length - 1]];
  const px = (x) => left + (x1 === x0 ? 0.5 : (x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  const path = (points) => points.map(([x, y], i) => `${i ? 'L' : 'M'}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join('');

  const drawing = svg('svg', { viewBox: `0 0 ${width} ${height}`, class: 'drawing', 'aria-hidden': 'true' });
  for (const tick of ticks) {
    const y = py(tick);
    drawing.append(svg('line', { x1: left, x2: width - right, y1: y, y2: y, class: tick === 0 ? 'zero' : 'grid' }));
    drawing.append(svg('text', { x: left - 6, y: y + 3.5, class: 'tick', 'text-anchor': 'end' }, brief(tick)));
  }
  drawing.append(svg('text', { x: px(x0), y: height - 5, class: 'tick', 'text-anchor': x1 === x0 ? 'middle' : 'start' }, x1 === x0 ? `step ${x0}` : String(x0)));
  if (x1 !== x0) drawing.append(svg('text', { x: px(x1), y: height - 5, class: 'tick', 'text-anchor': 'end' }, `step ${x1}`));
  if (band) drawing.append(svg('path', { d: path(band[0]) + path([...band[1]].reverse()).replace('M', 'L') + 'Z', class: 'band' }));
  series.forEach(([, points], i) => {
    const isNoisy = points.length > 40;
    drawing.append(svg('path', { d: path(points), class: `line line-${i}` + (isNoisy ? ' faint' : '') }));
    if (isNoisy) drawing.append(svg('path', { d: path(smoothed(points)), class: `line line-${i}` }));
    if (points.length < 16) for (const [x, y] of points) drawing.append(svg('circle', { cx: px(x), cy: py(y), r: 2.2, class: `dot dot-${i}` }));
  });
  const cursor = svg('g', { class: 'cursor', visibility: 'hidden' }, svg('line', { y1: top, y2: height - bottom }), ...series.map((_, i) => svg('circle', { r: 3.5, class: `dot dot-${i}` })));
  drawing.append(cursor);

  const reading = el('output', { class: 'reading' });
  const plot = el('div', { class: 'plot', tabIndex: 0, role: 'img' }, drawing);
  const last = (points) => points[points.length - 1];
  const said = series.map(([label, points]) => `${label}: ${brief(points[0][1])} at step ${points[0][0]}, ${brief(last(points)[1])} at step ${last(points)[0]}`);
  plot.setAttribute('aria-label', `${title}. ${said.join('. ')}. Arrow keys read the points.`);
  const rest = () => {
    cursor.setAttribute('visibility', 'hidden');
    reading.replaceChildren(...key(series.map(([label, points]) => [label, last(points)[1]])));
  };
  const key = (values) => values.map(([label, value], i) => el('span', { class: `key key-${i}` }, (series.length > 1 ? label + ' ' : '') + (value === null ? '-' : brief(value))));
  const steps = [...new Set(series.flatMap(([, points]) => points.map(([x]) => x)))].sort((a, b) => a - b);
  let place = steps.length - 1;
  const point = (index) => {
    place = Math.max(0, Math.min(steps.length - 1, index));
    const x = steps[place];
    cursor.setAttribute('visibility', 'visible');
    cursor.firstChild.setAttribute('x1', px(x));
    cursor.firstChild.setAttribute('x2', px(x));
    const values = series.map(([label, points], i) => {
      const found = points.find(([step]) => step === x);
      const circle = cursor.childNodes[i + 1];
      circle.setAttribute('visibility', found ? 'inherit' : 'hidden');
      if (found) { circle.setAttribute('cx', px(x)); circle.setAttribute('cy', py(found[1])); }
      return [label, found ? found[1] : null];
    });
    reading.replaceChildren(el('span', { class: 'at' }, `step ${x}`), ...key(values));
  };
  plot.addEventListener('pointermove', (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(px(step) - at) < Math.abs(px(steps[best]) - at)) best = i; });
    point(best);
  });
  plot.addEventListener('pointerleave', rest);
  plot.addEventListener('focus', () => { if (plot.matches(':focus-visible')) point(place); });
  plot.addEventListener('blur', rest);
  plot.addEventListener('keydown', (event) => {
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(to);
  });
  rest();
  return el('figure', { class: 'chart' }, el('figcaption', {}, title, unit ? el('span', { class: 'unit' }, unit) : null), reading, plot);
}

function showCurves(curves) {
  const shown = new Set();
  const has = (name) => name in curves;
  for (const [title, unit, wanted, band] of CHARTS) {
    const series = wanted.filter(([, name]) => has(name)).map(([label, name]) => [label, curves[name]]);
    if (!series.length) continue;
    const isBanded = band && band.every(has);
    byId('charts').append(chart(title, unit, series, isBanded ? band.map((name) => curves[name]) : null));
    for (const name of [...wanted.map(([, n]) => n), ...(isBanded ? band : [])]) shown.add(name);
  }
  const others = Object.keys(curves).filter((name) => !shown.has(name) && !NOT_CURVES.test(name)).sort();
  const more = byId('more');
  if (others.length) {
    more.hidden = false;
    more.firstElementChild.textContent = `All other metrics (${others.length})`;
    more.addEventListener('toggle', () => {
      if (more.open && !byId('more-charts').childElementCount) {
        byId('more-charts').append(...others.map((name) => chart(name, '', [[name, curves[name]]], null)));
      }
    });
  }
  byId('curves').hidden = !Object.keys(curves).length;
}
