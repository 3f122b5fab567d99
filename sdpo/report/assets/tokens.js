// The tokens of a completion, tinted, and the card that says more about one of them.

const VIEWS = {
  credit: { label: 'Credit', isSigned: true, full: 2, low: 'teacher finds it less likely', high: 'more likely' },
  divergence: { label: 'Divergence', isSigned: false, full: 1, low: 'they agree', high: 'they differ' },
  surprise: { label: 'Surprise', isSigned: false, full: 4, low: 'the student expected it', high: 'was surprised' },
  entropy: { label: 'Entropy', isSigned: false, full: 2, low: 'the student was sure', high: 'had many ideas' },
};
const SCALES = [0.5, 1, 2, 4, 8];
const tint = { view: 'credit', full: 2 };

/** What the tokens of an attempt are tinted by, in nats; null where it was not computed. */
function tintValues(row) {
  const column = { credit: row.credit, divergence: row.divergence, surprise: row.student_logp, entropy: row.entropy }[tint.view];
  if (!column) return null;
  return column.map((value) => (tint.view === 'surprise' ? -value : value) / 100);
}

/** Size and sign of a tint: 0 ... 1, and 'pos', 'neg' or 'one'. */
function tintOf(value) {
  const size = Math.min(1, Math.abs(value) / tint.full) ** 0.75;
  return [size, VIEWS[tint.view].isSigned ? (value < 0 ? 'neg' : 'pos') : 'one'];
}

/** Alternatives of each token, out of the flat lists. */
function alternativesOf(flat, texts) {
  if (!flat) return null;
  let at = 0;
  return flat.n.map((count) => {
    const found = [];
    for (let i = 0; i < count; i++) found.push([texts[flat.t[at + i]], flat.p[at + i] / 1000]);
    at += count;
    return found;
  });
}

class Tokens {
  /** `row` of a detail blob, `texts` the table of token texts. */
  constructor(row, texts) {
    this.row = row;
    this.texts = row.tokens.map((number) => texts[number]);
    this.student = alternativesOf(row.student, texts);
    this.teacher = alternativesOf(row.teacher, texts);
    this.current = 0;
    this.pinned = false;
    const bits = this.texts.map((text, i) => {
      const shown = text === '' ? '\u2205' : visible(text).replace(/\n/g, '\u23ce\n').replace(/\t/g, '\u21e5\t');
      const span = el('span', { class: 'token', tabIndex: i ? -1 : 0, role: 'button' }, shown);
      span.dataset.place = i;
      return span;
    });
    this.spans = bits;
    this.node = el('div', {
      class: 'tokens', role: 'group',
      'aria-label': `Completion of ${bits.length} tokens. Arrow keys go from token to token.`,
      onkeydown: (event) => this.onKey(event),
      onfocusin: (event) => this.onFocus(event),
      onfocusout: () => this.leave(),
      onpointerover: (event) => { if (event.pointerType === 'mouse') this.hover(event.target); },
      onpointerleave: () => { if (!this.pinned) hideCard(); },
      onclick: (event) => this.onClick(event),
    }, ...bits);
    this.paint();
  }

  paint() {
    const values = tintValues(this.row);
    this.node.classList.toggle('untinted', !values);
    this.spans.forEach((span, i) => {
      const [size, kind] = values ? tintOf(values[i]) : [0, 'none'];
      span.style.setProperty('--t', size.toFixed(3));
      span.dataset.kind = size < 0.02 ? 'none' : kind;
      span.classList.toggle('strong', size > 0.35);
    });
  }

  placeOf(target) {
    const span = target instanceof Element ? target.closest('.token') : null;
    return span && this.node.contains(span) ? Number(span.dataset.place) : null;
  }

  /** The tokens with the largest credit. */
  strongest(number) {
    if (!this.row.credit) return [];
    return this.row.credit.map((value, i) => [Math.abs(value), i]).sort((a, b) => b[0] - a[0]).slice(0, number)
      .filter(([size]) => size >= 10).map(([, i]) => i);
  }

  go(place, { focus = true } = {}) {
    this.spans[this.current].tabIndex = -1;
    this.current = Math.max(0, Math.min(this.spans.length - 1, place));
    const span = this.spans[this.current];
    span.tabIndex = 0;
    span.setAttribute('aria-label', this.said(this.current));
    if (focus) span.focus();
  }

  onKey(event) {
    const { key } = event;
    if (key === 'Escape') {
      event.stopPropagation();
      if (!byId('card').hidden && this.pinned) { this.pinned = false; hideCard(); return; }
      hideCard();
      backToList();
      return;
    }
    if (key === 'ArrowUp' || key === 'ArrowDown') {
      event.preventDefault();
      this.go(this.above(key === 'ArrowUp' ? -1 : 1));
      return;
    }
    const to = { ArrowLeft: this.current - 1, ArrowRight: this.current + 1, Home: 0, End: this.spans.length - 1 }[key];
    if (to === undefined) return;
    event.preventDefault();
    this.go(to);
  }

  /** The token of the next line that stands below this one, or of the line above. */
  above(direction) {
    const box = this.spans[this.current].getBoundingClientRect();
    const middle = box.left + box.width / 2;
    let best = null, line = null;
    for (let i = this.current + direction; i >= 0 && i < this.spans.length; i += direction) {
      const other = this.spans[i].getBoundingClientRect();
      if (Math.abs(other.top - box.top) < box.height / 2) continue;
      if (line === null) line = other.top;
      if (Math.abs(other.top - line) > box.height / 2) break;
      const distance = Math.abs(other.left + other.width / 2 - middle);
      if (best === null || distance < best[0]) best = [distance, i];
    }
    return best ? best[1] : this.current;
  }

  onFocus(event) {
    const place = this.placeOf(event.target);
    if (place === null) return;
    this.go(place, { focus: false });
    showCard(this, place);
  }

  leave() {
    this.pinned = false;
    hideCard();
  }

  hover(target) {
    const place = this.placeOf(target);
    if (place !== null && !this.pinned) showCard(this, place);
  }

  onClick(event) {
    const place = this.placeOf(event.target);
    if (place === null) return;
    this.pinned = true;
    this.go(place);
    showCard(this, place);
  }

  /** Probabilities of the token: of the student, and of the teacher where it was asked. */
  shares(i) {
    const { student_logp: logp, credit } = this.row;
    if (!logp) return [null, null];
    return [Math.exp(logp[i] / 100), credit ? Math.min(1, Math.exp((logp[i] + credit[i]) / 100)) : null];
  }

  said(i) {
    const [student, teacher] = this.shares(i);
    const text = `${spelled(this.texts[i])}, token ${i + 1} of ${this.texts.length}`;
    if (student === null) return `${text}, in no loss`;
    if (teacher === null) return `${text}, student ${percent(student)}`;
    return `${text}, credit ${signed(this.row.credit[i] / 100)} nats, student ${percent(student)}, teacher ${percent(teacher)}`;
  }
}

function shareBar(label, share, kind) {
  const bar = el('span', { class: `bar ${kind}` });
  bar.style.setProperty('--share', share ?? 0);
  return el('div', { class: 'share' }, el('span', { class: 'share-name' }, label), bar, el('span', { class: 'share-number' }, percent(share)));
}

function topList(heading, top, chosen, kind) {
  const items = top.map(([text, share]) => {
    const item = el('li', { class: text === chosen ? 'chosen' : null }, el('code', { dir: 'auto' }, spelled(text)), el('span', { class: 'top-share' }, percent(share)));
    item.style.setProperty('--share', share);
    return item;
  });
  return el('div', { class: `likely ${kind}` }, el('h4', {}, heading), items.length ? el('ol', {}, ...items) : el('p', { class: 'muted' }, 'not known'));
}

function cardContent(tokens, i) {
  const { row } = tokens;
  const [student, teacher] = tokens.shares(i);
  const parts = [el('p', { class: 'card-token' }, el('code', { dir: 'auto' }, spelled(tokens.texts[i])), el('span', { class: 'muted' }, `token ${i + 1} of ${tokens.texts.length}`))];
  if (student === null) {
    parts.push(el('p', { class: 'muted' }, 'This attempt is in no loss, so nothing was computed for it.'));
    return parts;
  }
  parts.push(shareBar('student', student, 'student'));
  if (teacher !== null) {
    parts.push(shareBar('teacher', teacher, 'teacher'));
    const credit = row.credit[i] / 100;
    const times = Math.exp(Math.abs(credit));
    const words = Math.abs(credit) < 0.05 ? 'they agree' : `the teacher finds it ${times >= 100 ? brief(Math.round(times)) : times.toFixed(times < 10 ? 1 : 0)} times ${credit > 0 ? 'likelier' : 'less likely'}`;
    parts.push(el('p', { class: `card-credit ${credit < 0 ? 'neg' : 'pos'}` }, el('b', {}, signed(credit)), ` nats: ${words}`));
  }
  if (tokens.student && tokens.teacher) {
    const text = tokens.texts[i];
    parts.push(el('div', { class: 'tops' }, topList('Student would say', tokens.student[i], text, 'student'), topList('Teacher would say', tokens.teacher[i], text, 'teacher')));
  }
  const extra = [];
  if (row.divergence) extra.push(`divergence ${signed(row.divergence[i] / 100)}`);
  if (row.entropy) extra.push(`entropy ${(row.entropy[i] / 100).toFixed(2)}`);
  if (extra.length) parts.push(el('p', { class: 'muted' }, extra.join(', ') + ' nats'));
  return parts;
}

function showCard(tokens, i) {
  const card = byId('card');
  for (const other of document.querySelectorAll('.token.current')) other.classList.remove('current');
  tokens.spans[i].classList.add('current');
  card.replaceChildren(...cardContent(tokens, i));
  card.hidden = false;
  if (matchMedia('(max-width: 760px)').matches) {
    card.style.left = card.style.top = '';
    // The card lies at the bottom of the screen; the token is to be seen above it.
    const covered = tokens.spans[i].getBoundingClientRect().bottom + 16 - (innerHeight - card.offsetHeight);
    if (covered > 0) scrollBy(0, covered);
    return;
  }
  const [first] = tokens.spans[i].getClientRects();
  const box = first ?? tokens.spans[i].getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const left = Math.max(8, Math.min(box.left - 12, innerWidth - width - 8));
  const isBelow = box.bottom + height + 16 < innerHeight || box.top - height - 10 < 0;
  card.style.left = `${left}px`;
  card.style.top = `${Math.max(8, isBelow ? box.bottom + 8 : box.top - height - 8)}px`;
}

function hideCard() {
  byId('card').hidden = true;
  for (const other of document.querySelectorAll('.token.current')) other.classList.remove('current');
}
