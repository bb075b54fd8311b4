// AnswerView: one answer as it comes, its tokens in the colours of who proposed them.

import { AnswerTrace } from "./trace.js";

const { make } = parts;

export class AnswerView {
  // `name` says in words which answer this is; `choose` is called with the view and a token that was chosen.
  constructor(title, name, words, pane, choose) {
    Object.assign(this, { title, content: "", reasoning: "", raw: "", finish: null, metrics: null, error: null });
    this.trace = new AnswerTrace(words);
    this.words = words;
    this.choose = choose;
    this.groups = [];
    this.spans = [];
    this.at = 0; // the token that Tab leads to
    this.element = make("section", "column");
    this.element.setAttribute("aria-label", name);
    this.rate = make("p", "rate");
    this.legend = make("ul", "keys");
    this.spoken = make("p", "unseen");
    this.spoken.setAttribute("aria-live", "polite");
    this.tokens = make("span", "tokens");
    this.tokens.setAttribute("role", "listbox");
    this.tokens.setAttribute("aria-orientation", "horizontal");
    this.tokens.setAttribute("aria-label", `Tokens of ${name}`);
    this.tokens.hidden = true;
    this.tail = make("span", "tail"); // text without tokens
    const head = make("div", "line head"), answer = make("div", "answer");
    head.append(make("h3", "", title), this.rate);
    answer.append(this.tokens, this.tail);
    this.element.append(head, this.spoken, answer, this.legend);
    this.listen(pane);
  }

  listen(pane) {
    parts.listenToTokens(this.tokens, pane, {
      place: () => ({ token: this.at, pass: this.passAt, tokens: this.spans.length }),
      select: (span) => this.select(Number(span.dataset.token)),
      toToken: (index) => this.toToken(index),
      toPass: (number) => this.toPass(number),
    });
  }

  // Takes a chunk of the stream.
  take(chunk) {
    this.add(this.trace.take(chunk.trace ?? []));
    for (const { delta, finish_reason: reason } of chunk.choices) {
      this.reasoning += delta.reasoning_content ?? "";
      this.content += delta.content ?? "";
      this.finish = reason ?? this.finish;
    }
    this.metrics = chunk.metrics ?? this.metrics;
    this.showTail();
    this.showFigures();
  }

  add(passes) {
    for (const pass of passes) {
      const group = parts.passGroup(this.words, pass, { number: this.groups.length, first: this.spans.length, role: "option" });
      this.groups.push(group);
      this.spans.push(...group.children);
      this.raw += pass.text.join("");
      if (group.firstChild) this.tokens.append(group);
    }
    if (this.tokens.hidden && this.spans.length) {
      this.tokens.hidden = false;
      this.spans[0].tabIndex = 0;
    }
  }

  get said() { return this.reasoning + this.content; }

  // Shows what no token shows: all of it without a trace, else what came after its end.
  showTail() {
    const said = this.raw ? this.content : this.said;
    this.tail.textContent = said.startsWith(this.raw) ? said.slice(this.raw.length) : "";
  }

  showFigures() {
    const count = this.trace.tokens;
    if (!count) return;
    const rate = this.perSecond;
    this.rate.textContent = [
      ...(rate === null ? [] : [`${rate.toFixed(1)} tokens/s`]), `${this.trace.perPass.toFixed(2)} tokens per pass`, parts.plural(count, "token"),
    ].join(" · ");
    this.legend.replaceChildren(...parts.legend(this.words, this.trace.proposers, this.trace.own));
  }

  // Tokens a second: so far by the trace, in the end by the server's figures.
  get perSecond() {
    return this.metrics?.mean_itl_ms ? 1000 / this.metrics.mean_itl_ms : this.trace.rate;
  }

  // Ends the answer, with an error or the word "stopped" if it is not whole.
  end(error = null) {
    this.error = error;
    if (!error) this.dropSurplus();
    if (!this.trace.passes.length && this.metrics) this.rate.textContent = `${this.perSecond?.toFixed(1) ?? "–"} tokens/s`;
    if (this.trace.cut) this.element.append(make("p", "small muted", "The trace ended here: the passes of a long answer have too many draft tokens."));
    if (error) this.element.append(make("p", "error", error));
    this.spoken.textContent = error ? `${this.content} ${error}` : this.content;
  }

  // A stop string cuts text that tokens have shown already.
  dropSurplus() {
    let surplus = this.raw.startsWith(this.content) ? this.raw.length - this.content.length : 0;
    for (const span of [...this.spans].reverse()) {
      const cut = Math.min(surplus, span.textContent.length);
      if (!cut) continue;
      span.textContent = span.textContent.slice(0, -cut);
      surplus -= cut;
    }
    if (this.raw.startsWith(this.content)) this.raw = this.content;
  }

  // Marks the token that holds a character; tokens have marks around reasoning, too, so there it finds none.
  mark(character) {
    if (this.reasoning) return;
    let end = 0;
    const span = this.spans.find((each) => (end += each.textContent.length) > character);
    span?.classList.add("parting");
  }

  select(index) {
    this.leave();
    this.spans[this.at].tabIndex = -1;
    this.at = index;
    const span = this.spans[index], group = this.groups[this.passAt];
    span.tabIndex = 0;
    span.setAttribute("aria-selected", "true");
    for (const each of [span, group]) each.classList.add("chosen");
    this.choose(this, this.passAt, index - Number(group.firstChild.dataset.token));
  }
  get passAt() { return Number(this.spans[this.at].dataset.pass); }
  // Takes the marks away; the place of the keyboard stays.
  leave() {
    for (const each of this.element.querySelectorAll(".chosen")) each.classList.remove("chosen");
    this.spans[this.at]?.removeAttribute("aria-selected");
  }
  // Chooses a pass, by its first token if it has one.
  show(number) {
    const first = this.groups[number].firstChild;
    if (first) return this.select(Number(first.dataset.token));
    this.leave();
    this.choose(this, number, null);
  }
  toToken(index) {
    this.spans[Math.max(0, Math.min(this.spans.length - 1, index))].focus();
  }
  // Goes to a pass, or beyond one without tokens to the next.
  toPass(number) {
    const step = number < this.passAt ? -1 : 1;
    while (this.groups[number] && !this.groups[number].firstChild) number += step;
    this.groups[number]?.firstChild.focus();
  }
}
