// One attempt: what happened, its tokens, and what its teacher was shown.

let shownTokens = null;

function badge(text, kind = '') {
  return el('span', { class: `badge ${kind}` }, text);
}

function badgesOf(attempt, row) {
  const found = [attempt.isSuccess ? badge('\u2713 succeeded', 'good') : badge('\u2717 failed', 'bad')];
  found.push(badge(attempt.reward === null ? 'no reward' : `reward ${brief(attempt.reward)}`));
  const names = Object.keys(row.rewards);
  if (names.length > 1) for (const name of names) found.push(badge(`${name} ${row.rewards[name] === null ? '-' : brief(row.rewards[name])}`));
  if (row.advantage !== null) found.push(badge(`advantage ${signed(row.advantage)}`));
  if (attempt.isDistilled) found.push(badge('taught', 'note'));
  if (attempt.isTruncated) found.push(badge('cut at the length limit', 'warn'));
  if (attempt.isPromptCut) found.push(badge('its prompt was cut', 'warn'));
  if (attempt.isShortened) found.push(badge('teacher prompt shortened', 'warn'));
  return el('p', { class: 'badges' }, ...found);
}

const quoted = (text) => el('code', { class: 'quoted', dir: 'auto' }, spelled(text));

/** What happened, in a sentence or two. */
function storyOf(attempt, row, tokens) {
  const story = el('p', { class: 'story' });
  const demonstration = { sibling: 'a sibling that succeeded', earlier: 'an earlier success', column: 'the solution of the dataset' }[row.source];
  const shown = [demonstration, row.shown_feedback >= 0 ? 'the feedback about this attempt' : null].filter(Boolean);
  if (!shown.length && row.teacher_prompt !== row.prompt) shown.push('a question of its own');
  story.append(shown.length ? `The teacher was shown ${shown.join(' and ')}. ` : 'The teacher was shown no more than the student, so it taught nothing here. ');
  if (!attempt.isDistilled && shown.length) story.append('It is in no distillation loss. ');
  const [place] = tokens.strongest(1);
  if (place !== undefined) {
    const [student, teacher] = tokens.shares(place);
    story.append('They differ most at ', quoted(tokens.texts[place]), `: student ${percent(student)}, teacher ${percent(teacher)}`);
    const better = tokens.teacher && tokens.teacher[place][0];
    if (better && better[0] !== tokens.texts[place]) story.append('. It would say ', quoted(better[0]), ` (${percent(better[1])})`);
    story.append('.');
  } else if (row.credit) story.append('They agree on every token to within 0.1 nats.');
  return story;
}

function lessonsOf(tokens) {
  const places = tokens.strongest(6).sort((a, b) => a - b);
  if (places.length < 2) return null;
  const chips = places.map((place) => {
    const credit = tokens.row.credit[place] / 100;
    return el('button', {
      class: `lesson ${credit < 0 ? 'neg' : 'pos'}`, type: 'button',
      'aria-label': `Token ${place + 1}, ${spelled(tokens.texts[place])}, credit ${signed(credit)} nats`,
      onclick: () => { tokens.pinned = true; tokens.go(place); },
    }, el('code', { dir: 'auto' }, spelled(tokens.texts[place])), ` ${signed(credit, 1)}`);
  });
  return el('p', { class: 'lessons' }, el('span', { class: 'muted' }, 'Strongest: '), ...chips);
}

function legendOf(tokens) {
  const view = VIEWS[tint.view];
  const again = () => { tokens.paint(); legend.replaceWith(legendOf(tokens)); };
  const views = el('div', { class: 'switch', role: 'group', 'aria-label': 'Tint by' }, ...Object.entries(VIEWS).map(([name, { label, full }]) => el('button', {
    type: 'button', 'aria-pressed': String(name === tint.view),
    onclick: (event) => { tint.view = name; tint.full = full; again(); document.querySelector('.switch [aria-pressed=true]').focus(); event.stopPropagation(); },
  }, label)));
  const scale = el('select', { 'aria-label': 'full colour from', onchange: () => { tint.full = Number(scale.value); again(); document.querySelector('.legend select').focus(); } },
    ...SCALES.map((size) => el('option', { value: String(size), selected: size === tint.full }, `\u00b1${size}`.slice(view.isSigned ? 0 : 1) + ' nats')));
  const legend = el('div', { class: 'legend' }, views,
    el('div', { class: 'ramp-line' }, el('span', { class: 'ramp-word' }, view.low), el('span', { class: `ramp ${view.isSigned ? 'two' : 'one'}`, 'aria-hidden': 'true' }), el('span', { class: 'ramp-word' }, view.high), el('label', { class: 'scale' }, 'full colour at ', scale)));
  return legend;
}

/** Text with some parts of it marked, each at its first place. */
function marked(text, marks) {
  let pieces = [[text, null]];
  for (const [part, kind] of marks) {
    if (!part || !part.trim()) continue;
    const index = pieces.findIndex(([piece, of]) => of === null && piece.includes(part));
    if (index < 0) continue;
    const [piece] = pieces[index], at = piece.indexOf(part);
    pieces.splice(index, 1, [piece.slice(0, at), null], [part, kind], [piece.slice(at + part.length), null]);
  }
  return pieces.filter(([piece]) => piece).map(([piece, kind]) => (kind ? el('mark', { class: kind }, visible(piece)) : visible(piece)));
}

function pane(title, note, children, kind = '') {
  const body = children.length ? el('pre', { class: 'text', dir: 'auto', tabIndex: 0, 'aria-label': title }, ...children) : el('p', { class: 'muted nothing' }, 'none');
  return el('section', { class: `pane ${kind}` }, el('h3', {}, title, note ? el('span', { class: 'unit' }, note) : null), body);
}

function siblingsOf(attempt, open) {
  const siblings = attempts.filter((other) => other.step === attempt.step && other.block === attempt.block && other.group === attempt.group);
  if (siblings.length < 2) return null;
  const links = siblings.map((other) => el('button', {
    type: 'button', class: `sibling ${other.isSuccess ? 'good' : 'bad'}`,
    'aria-current': other === attempt ? 'true' : null,
    'aria-label': `Row ${other.row}, ${other.isSuccess ? 'succeeded' : 'failed'}${other.row === attempt.demonstration ? ', the demonstration' : ''}`,
    onclick: () => open(other.number),
  }, `${other.isSuccess ? '\u2713' : '\u2717'} ${other.row}`, other.row === attempt.demonstration ? el('span', { class: 'star', title: 'the demonstration' }, ' \u2605') : null));
  return el('p', { class: 'siblings' }, el('span', { class: 'muted' }, 'Same question: '), ...links, attempt.demonstration !== null ? el('span', { class: 'muted' }, ' \u2605 the demonstration') : null);
}

function detailOf(attempt, row, strings, texts, open) {
  const string = (number) => (number < 0 ? null : strings[number]);
  const tokens = new Tokens(row, texts);
  shownTokens = tokens;
  const prompt = string(row.prompt), teacher = string(row.teacher_prompt);
  const demonstration = string(row.demonstration_text), feedback = string(row.feedback), shown = string(row.shown_feedback);
  const isSame = teacher === prompt;
  return [
    el('header', { class: 'detail-head' },
      el('button', { type: 'button', class: 'quiet back', onclick: backToList }, '\u2190 all attempts'),
      el('h3', {}, `Step ${attempt.step}, question ${attempt.group}, row ${attempt.row}`),
      el('span', { class: 'turns' },
        el('button', { type: 'button', class: 'quiet', 'aria-label': 'Previous attempt of the list', onclick: () => moveInList(-1) }, '\u2191'),
        el('button', { type: 'button', class: 'quiet', 'aria-label': 'Next attempt of the list', onclick: () => moveInList(1) }, '\u2193'))),
    badgesOf(attempt, row),
    siblingsOf(attempt, open),
    storyOf(attempt, row, tokens),
    lessonsOf(tokens),
    row.student_logp ? legendOf(tokens) : el('p', { class: 'muted' }, 'No loss trains on this attempt, so nothing was computed for its tokens.'),
    tokens.node,
    el('div', { class: 'panes' },
      pane('Teacher prompt', isSame ? 'as the student\u2019s' : null, marked(teacher, [[demonstration, 'demonstration'], [shown, 'feedback']])),
      pane('Feedback', feedback && !shown ? 'not shown to the teacher' : null, feedback ? [visible(feedback)] : [], 'feedback'),
      pane('Demonstration', attempt.demonstration !== null ? `row ${attempt.demonstration}` : { earlier: 'an earlier success', column: 'of the dataset' }[row.source], demonstration ? [visible(demonstration)] : [], 'demonstration')),
    isSame ? null : el('details', { class: 'student-prompt' }, el('summary', {}, 'Prompt of the student'), el('pre', { class: 'text', dir: 'auto' }, visible(prompt))),
  ].filter(Boolean);
}
