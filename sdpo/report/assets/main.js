// Reads the data and puts the page together.

let tokenTexts = null;
let rowsOfDetail = 1;

const THEMES = { auto: 'Theme: automatic', light: 'Theme: light', dark: 'Theme: dark' };

function prepareTheme() {
  const button = byId('theme');
  let theme = 'auto';
  try { theme = localStorage.getItem('sdpo-report-theme') ?? 'auto'; } catch { /* a page from a file may have no storage */ }
  const apply = () => {
    if (!(theme in THEMES)) theme = 'auto';
    document.documentElement.dataset.theme = theme;
    button.textContent = THEMES[theme];
  };
  button.addEventListener('click', () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    try { localStorage.setItem('sdpo-report-theme', theme); } catch { /* as above */ }
    apply();
  });
  apply();
}

async function openAttempt(number, { isAsked = false } = {}) {
  const attempt = attempts[number];
  if (!attempt) return;
  chosen = number;
  hideCard();
  if (isAsked) byId('attempts').dataset.view = 'detail';
  scrollToChosen();
  drawRows();
  const detail = byId('detail');
  const [blob, texts] = await Promise.all([readDetail(Math.floor(number / rowsOfDetail)), tokenTexts]);
  if (chosen !== number) return; // another one was opened in the meantime
  detail.replaceChildren(...detailOf(attempt, blob.rows[number % rowsOfDetail], blob.strings, texts, (other) => openAttempt(other, { isAsked: true })));
  detail.scrollTop = 0;
  if (location.hash !== `#attempt=${number}`) history.replaceState(null, '', `#attempt=${number}`);
  if (isAsked && matchMedia('(max-width: 760px)').matches) detail.focus();
  document.documentElement.dataset.shown = String(number);
}

function backToList() {
  hideCard();
  byId('attempts').dataset.view = 'list';
  byId('list').focus();
}

function numberInHash() {
  const match = /^#attempt=(\d+)$/.exec(location.hash);
  return match ? Number(match[1]) : null;
}

function showFacts(meta) {
  const [first, last] = meta.steps;
  const facts = [`${grouped(meta.numAttempts)} attempts`];
  if (meta.steps.length) facts.push(first === last ? `step ${first}` : `steps ${first} to ${last}`);
  if (meta.numLeftOut) facts.push(`${grouped(meta.numLeftOut)} steps left out (--max-attempts)`);
  byId('facts').textContent = facts.join(' \u00b7 ');
}

async function start() {
  prepareTheme();
  const meta = await readBlob('meta');
  rowsOfDetail = meta.rowsOfDetail;
  showFacts(meta);
  showCurves(meta.curves);
  if (!meta.numAttempts) {
    document.documentElement.dataset.ready = 'true';
    return;
  }
  byId('attempts').hidden = false;
  [byId('first-step').min, byId('last-step').max] = meta.steps;
  [byId('first-step').placeholder, byId('last-step').placeholder] = meta.steps;
  prepareList();
  tokenTexts = readBlob('tokens');
  for (let part = 0; attempts.length < meta.numAttempts; part++) {
    const found = attemptsOf(await readBlob(`index-${part}`), attempts.length);
    attempts.push(...found);
    byId(`blob-index-${part}`).remove();
    if (part === 0) refreshList(); // something to see while the rest is read
  }
  refreshList({ keepPlace: true });
  const asked = numberInHash();
  if (listed.length) await openAttempt(asked !== null && asked < attempts.length ? asked : listed[0].number, { isAsked: asked !== null });
  document.documentElement.dataset.ready = 'true';
}

document.addEventListener('keydown', (event) => {
  const isTyping = event.target instanceof HTMLElement && event.target.matches('input, select, textarea');
  if (event.key === '/' && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    byId('search').focus();
  } else if (event.key === 'Escape') {
    if (event.target === byId('search')) byId('list').focus();
    else hideCard();
  }
});
document.addEventListener('pointerdown', (event) => {
  const isInside = event.target instanceof Element && event.target.closest('.tokens, .card, .lessons');
  if (!isInside) hideCard();
});
addEventListener('hashchange', () => {
  const number = numberInHash();
  if (number !== null && number !== chosen) openAttempt(number, { isAsked: true });
});
addEventListener('scroll', () => { if (shownTokens && !shownTokens.node.contains(document.activeElement)) hideCard(); }, { passive: true });

start().catch((error) => {
  const trouble = byId('trouble');
  trouble.hidden = false;
  trouble.textContent = `This page could not read its data: ${error}. A browser of 2023 or later is needed.`;
  throw error;
});
