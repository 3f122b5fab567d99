// The data, in blobs of compressed JSON that are read when they are needed.

const kept = new Map(); // the last details, so that going back and forth does not read them again
const KEPT = 12;

async function readBlob(name) {
  const text = byId('blob-' + name).textContent;
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return JSON.parse(await new Response(stream).text());
}

/** A blob that is asked for again and again. */
function readDetail(number) {
  const name = 'detail-' + number;
  if (!kept.has(name)) {
    if (kept.size >= KEPT) kept.delete(kept.keys().next().value);
    kept.set(name, readBlob(name));
  }
  return kept.get(name);
}

const FLAGS = ['isSuccess', 'isDistilled', 'isInPolicy', 'isPromptCut', 'isShortened', 'isTruncated'];

/** The attempts of one blob of the index. */
function attemptsOf(part, start) {
  return part.step.map((step, i) => {
    const attempt = {
      number: start + i,
      step,
      block: part.block[i],
      group: part.group[i],
      row: part.row[i],
      reward: part.reward[i],
      numTokens: part.num_tokens[i],
      meanCredit: part.mean_credit[i] === null ? null : part.mean_credit[i] / 100,
      maxCredit: part.max_credit[i] === null ? null : part.max_credit[i] / 100,
      strip: part.strip[i],
      demonstration: part.demonstration[i],
      completion: part.completion[i],
      prompt: part.strings[part.prompt[i]],
      feedback: part.feedback[i] < 0 ? null : part.strings[part.feedback[i]],
      searched: null,
    };
    FLAGS.forEach((flag, bit) => { attempt[flag] = Boolean(part.flags[i] & (1 << bit)); });
    return attempt;
  });
}
