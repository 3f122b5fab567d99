// The list of attempts: filters, order, and only the rows that are in sight.

const ROW = 74; // height of a row, as the style has it
const attempts = []; // all, in the order of the run
let listed = []; // those that the filters let through, in the chosen order
let chosen = null; // number of the open attempt

const ORDERS = {
  credit: (a, b) => (b.meanCredit ?? -1) - (a.meanCredit ?? -1),
  peak: (a, b) => (b.maxCredit ?? -1) - (a.maxCredit ?? -1),
  first: () => 0,
  last: (a, b) => b.step - a.step,
  low: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  high: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  long: (a, b) => b.numTokens - a.numTokens,
};

function isWanted() {
  const words = byId('search').value.toLowerCase().split(/\s+/).filter(Boolean);
  const outcome = byId('outcome').value, taught = byId('taught').value, feedback = byId('feedback').value;
  const first = byId('first-step').value === '' ? -Infinity : Number(byId('first-step').value);
  const last = byId('last-step').value === '' ? Infinity : Number(byId('last-step').value);
  return (attempt) => {
    if (attempt.step < first || attempt.step > last) return false;
    if (outcome && attempt.isSuccess !== (outcome === 'success')) return false;
    if (taught && attempt.isDistilled !== (taught === 'yes')) return false;
    if (feedback && (attempt.feedback !== null && attempt.feedback !== '') !== (feedback === 'yes')) return false;
    if (!words.length) return true;
    attempt.searched ??= [attempt.prompt, attempt.completion, attempt.feedback ?? ''].join('\n').toLowerCase();
    return words.every((word) => attempt.searched.includes(word));
  };
}

function refreshList({ keepPlace = false } = {}) {
  listed = attempts.filter(isWanted()).sort(ORDERS[byId('order').value]);
  byId('count').textContent = listed.length === attempts.length ? `${grouped(attempts.length)} attempts` : `${grouped(listed.length)} of ${grouped(attempts.length)} attempts`;
  byId('list-space').style.height = `${listed.length * ROW}px`;
  if (!keepPlace) byId('list').scrollTop = 0;
  drawRows();
}

/** A small picture of the credit: a cell a stretch of tokens. */
function stripOf(letters) {
  const strip = el('span', { class: 'strip', 'aria-hidden': 'true' });
  for (const letter of letters) {
    const value = letter.charCodeAt(0) - 109; // 'm' is 0
    const cell = el('i', { class: value < 0 ? 'neg' : 'pos' });
    cell.style.setProperty('--t', Math.min(1, Math.abs(value) / 6).toFixed(2));
    strip.append(cell);
  }
  return strip;
}

function rowOf(attempt, place) {
  const isChosen = attempt.number === chosen;
  const credit = attempt.meanCredit;
  const row = el('div', {
    class: 'row', role: 'option', id: `attempt-${attempt.number}`,
    'aria-selected': String(isChosen), 'aria-posinset': String(place + 1), 'aria-setsize': String(listed.length),
    onclick: () => openAttempt(attempt.number, { isAsked: true }),
  },
  el('span', { class: `mark ${attempt.isSuccess ? 'good' : 'bad'}`, title: attempt.isSuccess ? 'succeeded' : 'failed' }, attempt.isSuccess ? '\u2713' : '\u2717'),
  el('span', { class: 'row-text', dir: 'auto' }, visible(attempt.completion.trim().slice(0, 160)) || '(empty)'),
  el('span', { class: 'row-facts' }, `step ${attempt.step}`, attempt.reward === null ? '' : ` \u00b7 reward ${brief(attempt.reward)}`, attempt.feedback ? ' \u00b7 feedback' : '', attempt.isTruncated ? ' \u00b7 cut' : ''),
  stripOf(attempt.strip),
  el('span', { class: 'row-credit', title: 'mean |credit| in nats' }, credit === null ? 'not taught' : credit.toFixed(2)));
  row.style.top = `${place * ROW}px`;
  return row;
}

function drawRows() {
  const list = byId('list'), space = byId('list-space');
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
  const last = Math.min(listed.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 6);
  const rows = [];
  for (let place = first; place < last; place++) rows.push(rowOf(listed[place], place));
  space.replaceChildren(...rows);
  const isDrawn = chosen !== null && byId(`attempt-${chosen}`);
  if (isDrawn) list.setAttribute('aria-activedescendant', `attempt-${chosen}`);
  else list.removeAttribute('aria-activedescendant');
}

function scrollToChosen() {
  const place = listed.findIndex((attempt) => attempt.number === chosen);
  if (place < 0) return;
  const list = byId('list');
  if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
  else if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
}

/** Opens the attempt that stands so many rows below the open one. */
function moveInList(distance) {
  if (!listed.length) return;
  const place = listed.findIndex((attempt) => attempt.number === chosen);
  const next = place < 0 ? 0 : Math.max(0, Math.min(listed.length - 1, place + distance));
  openAttempt(listed[next].number);
}

function listKey(event) {
  const page = Math.max(1, Math.floor(byId('list').clientHeight / ROW) - 1);
  const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity }[event.key];
  if (by !== undefined) {
    event.preventDefault();
    moveInList(by);
  } else if (event.key === 'Enter' && shownTokens) {
    event.preventDefault();
    if (chosen !== null) byId('attempts').dataset.view = 'detail';
    shownTokens.go(shownTokens.strongest(1)[0] ?? 0);
  }
}

function prepareList() {
  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(refreshList, 120); };
  byId('filters').addEventListener('input', soon);
  byId('filters').addEventListener('submit', (event) => event.preventDefault());
  byId('filters').addEventListener('reset', () => setTimeout(refreshList));
  byId('list').addEventListener('scroll', () => requestAnimationFrame(drawRows), { passive: true });
  byId('list').addEventListener('keydown', listKey);
  new ResizeObserver(drawRows).observe(byId('list'));
}
