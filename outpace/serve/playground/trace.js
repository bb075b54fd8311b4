// The lines of a trace, as docs/guide/traces.md describes them, turned into passes as parts.js draws them.

const PROBABILITY = 3; // digits

// The texts that passes refer to by number; the same for the whole conversation, so that a source keeps its colour.
export class Words {
  constructor(phases) {
    Object.assign(this, { phases, sources: [], reasons: [], pieces: {} });
  }
  source(name) { return numbered(this.sources, name); }
  reason(text) { return numbered(this.reasons, text); }
  piece(token) { return this.pieces[token] ?? `token ${token}`; }
}

function numbered(known, text) {
  const found = known.indexOf(text);
  return found >= 0 ? found : known.push(text) - 1;
}

// The trace of one answer. `lines` holds what has come, for export.
export class AnswerTrace {
  constructor(words) {
    Object.assign(this, { words, lines: [], passes: [], cut: false, tokens: 0, own: 0 });
    this.uses = new Map(); // source -> its draft tokens
  }

  // Takes further lines; returns the passes among them.
  take(lines) {
    const before = this.passes.length;
    for (const line of lines) {
      this.lines.push(line);
      if (line.type === "pieces") Object.assign(this.words.pieces, line.pieces);
      if (line.type === "pass") this.add(drawn(line, this.words));
      if (line.type === "cut") this.cut = true;
    }
    return this.passes.slice(before);
  }

  add(pass) {
    this.passes.push(pass);
    this.tokens += pass.committed.length;
    for (const source of pass.by.slice(1)) this.use(source).drafted += 1;
    for (const source of pass.sources) {
      if (source === parts.TARGET) this.own += 1;
      else this.use(source).accepted += 1;
    }
  }
  use(source) {
    if (!this.uses.has(source)) this.uses.set(source, { source, drafted: 0, accepted: 0 });
    return this.uses.get(source);
  }

  // Tokens a second, by the server's clock and without the first pass, which reads the prompt.
  get rate() {
    const [first] = this.passes, last = this.passes.at(-1);
    return this.passes.length < 2 ? null : (this.tokens - first.committed.length) / (last.at - first.at);
  }
  get perPass() { return this.tokens / this.passes.length; }

  // The draft tokens of each source, and how many of them were accepted.
  get proposers() { return [...this.uses.values()].sort((a, b) => a.source - b.source); }
}

// A pass as the viewer's page gets it from Python (outpace/tracing/viewer/page.py); a test compares the two.
export function drawn(record, words) {
  const accepted = Math.min(record.path.length - 1, record.committed.length);
  const by = record.by.map((name, node) => (node === 0 ? parts.TARGET : words.source(name)));
  const judged = record.judged ?? [];
  return {
    at: record.at, rows: record.rows, tokens: record.tokens, parents: record.parents, path: record.path, committed: record.committed,
    by, accepted,
    why: record.tokens.map((_, node) => words.reason(reason(record, node, words))),
    text: record.text ?? record.committed.map((token) => words.piece(token)),
    sources: record.committed.map((_, i) => (i < accepted ? by[record.path[i + 1]] : parts.TARGET)),
    seconds: words.phases.map((phase) => record.seconds[phase] ?? 0),
    draft: Object.fromEntries(Object.entries(record.signals ?? {}).map(([node, [prob]]) => [node, prob])),
    target: Object.assign({}, ...judged.map((one) => one.children)),
    choices: Object.fromEntries(judged.map((one) => [one.node, one.choice])),
    decision: decision(record.decision),
  };
}

function decision(made) {
  if (!made) return "";
  const { kept, drafted, expected, speedup } = made;
  return `${made.reason} (${kept} of ${drafted} verified, ${expected.toFixed(2)} tokens expected, speedup ${speedup.toFixed(2)})`;
}

function reason(record, node, words) {
  const { path, parents, committed, trusted = [], judged = [] } = record;
  if (node === 0) return "the root: committed by the previous pass";
  if (path.includes(node)) {
    return trusted.includes(node) ? "accepted without the target: the method vouched for it" : "accepted: the target chose it";
  }
  const depth = path.indexOf(parents[node]);
  if (depth < 0) return "never judged: a token before it was rejected";
  if (depth >= committed.length) return "never judged: the request had ended";
  const at = judged.find((one) => one.node === parents[node]);
  const [its, chosen] = at ? [at.children[node], at.choice].map((prob) => prob.toFixed(PROBABILITY)) : [];
  return `rejected: the target chose ${quoted(words.piece(committed[depth]))}` + (at ? ` (probability ${its} against ${chosen})` : "");
}

// As Python quotes a text.
function quoted(text) {
  const mark = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escaped = text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\r", "\\r").replaceAll("\t", "\\t");
  return mark + (mark === "'" ? escaped.replaceAll("'", "\\'") : escaped) + mark;
}
