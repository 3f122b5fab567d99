// Text and elements. Nothing from the run ever becomes markup: every string goes into the page as a text node.

const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. Names with a dash are attributes. */
function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === 'class') made.className = value;
    else if (key.includes('-') || key === 'role') made.setAttribute(key, value === true ? '' : value);
    else if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// What would be unseen, or turn the text around it: control characters and marks of writing direction.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

function symbolOf(character) {
  const code = character.charCodeAt(0);
  if (code < 32) return String.fromCharCode(0x2400 + code);
  if (code === 127) return '\u2421';
  if (code >= 0xd800 && code <= 0xdfff) return '\ufffd';
  return `\u2039U+${code.toString(16).toUpperCase().padStart(4, '0')}\u203a`;
}

/** The text with what cannot be seen written out. Line ends and tabs stay. */
const visible = (text) => text.replace(UNSEEN, symbolOf);

/** A token as one line: also blanks and line ends are seen. */
function spelled(text) {
  if (text === '') return '\u2205 part of a character';
  return visible(text).replace(/\n/g, '\u23ce').replace(/\t/g, '\u21e5').replace(/ /g, '\u2423');
}

const THIN = '\u202f'; // narrow, and no line ends at it

function percent(share) {
  if (share === null) return '-';
  if (share > 0 && share < 0.001) return '< 0.1' + THIN + '%';
  return (100 * share).toFixed(share < 0.0995 || share > 0.995 ? 1 : 0) + THIN + '%';
}

/** A number with its sign, in two decimals. */
function signed(value, digits = 2) {
  if (value === null) return '-';
  const size = Math.abs(value).toFixed(digits);
  return (value < 0 ? '\u2212' : value > 0 ? '+' : '') + size;
}

/** A number of any size in few characters. */
function brief(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(1).replace('-', '\u2212');
  const text = size >= 100 ? value.toFixed(0) : size >= 1 ? String(+value.toFixed(2)) : String(+value.toPrecision(3));
  return text.replace('-', '\u2212');
}

const grouped = (number) => number.toLocaleString('en-US').replace(/,/g, THIN);
