// The playground: the conversation, and what its buttons and keys do.
// Text of models and users is untrusted: it only ever goes into the page through textContent.

import { AnswerView } from "./answer.js";
import * as client from "./client.js";
import { Controls } from "./controls.js";
import { asJSON, asMarkdown, asTrace, download } from "./export.js";
import { Words } from "./trace.js";

const { make } = parts;
const $ = (id) => document.getElementById(id);
const NEAR = 80; // pixels from the end of the conversation, where it follows what comes
const CONTEXT = 24; // characters shown before the place where two texts part
const state = { turns: [], words: null, pane: null, chosen: null, running: null };
const controls = new Controls($("controls"));

function tell(text) { $("status").textContent = text; }

async function connect() {
  try {
    const server = await client.settings();
    $("key-row").hidden = !client.key.get();
    $("model").textContent = server.model;
    document.title = `${server.model} – Outpace playground`;
    if (!controls.server) makePane(server);
    controls.offer(server);
    tell(server.traces ? "Ready." : "Ready. This server gives no traces, because callers share what it remembers: tokens have no colours.");
  } catch (error) {
    if (error.status === 401) return askForKey(error.message);
    tell(`The server does not answer: ${error.message}`);
  }
}
function makePane(server) {
  state.words = new Words(server.phases);
  state.pane = new parts.PassView($("pass-box"), state.words);
  state.pane.before.addEventListener("click", () => goPass(-1));
  state.pane.after.addEventListener("click", () => goPass(1));
  const close = make("button", "close", "close");
  close.type = "button";
  close.addEventListener("click", hidePass);
  state.pane.pinner.after(close);
  hidePass();
}
function askForKey(why) {
  $("key-row").hidden = false;
  $("key").focus();
  tell(`This server asks for an API key: ${why}.`);
}

class Turn {
  constructor(said, body) {
    Object.assign(this, { said, body, views: [], verdict: "", remembers: controls.remembers });
    const number = state.turns.length + 1;
    this.element = make("article", "exchange");
    this.element.setAttribute("aria-label", `Turn ${number}`);
    this.columns = make("div", "columns");
    const seed = make("p", "small muted", `seed ${body.seed}`);
    this.element.append(make("h2", "", "You"), make("p", "said", said), make("h2", "", "Answer"), this.columns, seed);
    $("empty").hidden = true;
    $("log").append(this.element);
  }
  // What the next request has of this turn: nothing if it has no answer.
  get messages() {
    const [view] = this.views;
    return view?.content ? [{ role: "user", content: this.said }, { role: "assistant", content: view.content }] : [];
  }
  add(method) {
    const title = `speculation: ${method}`;
    const view = new AnswerView(title, `answer ${state.turns.length}, ${title}`, state.words, state.pane, choose);
    this.views.push(view);
    this.columns.append(view.element);
    return view;
  }
  get speed() {
    const [on, off] = this.views.map((view) => view.perSecond);
    if (!on || !off) return "";
    const again = this.remembers ? " Its method remembers answers, so a question is faster the second time." : "";
    return ` With speculation: ${(on / off).toFixed(2)} times as fast, in one run.${again}`;
  }
  // Compares the texts of the two answers.
  compare() {
    const [first, second] = this.views.map((view) => view.said), at = parting(first, second);
    if (at === null) {
      this.verdict = `Equal: both texts are the same ${parts.plural(first.length, "character")}.${this.speed}`;
    } else {
      const [a, b] = [first, second].map((text) => text.slice(Math.max(0, at - CONTEXT), at + CONTEXT));
      this.verdict = `The texts part at character ${at + 1}: “${a}” against “${b}”.`;
      for (const view of this.views) view.mark(at);
    }
    this.element.append(make("p", at === null ? "verdict-line equal" : "verdict-line parted", this.verdict));
  }
}

// The first place at which two texts differ; null if they are equal.
function parting(a, b) {
  if (a === b) return null;
  let at = 0;
  while (at < a.length && a[at] === b[at]) at += 1;
  return at;
}

async function send() {
  const said = $("message").value;
  if (!said.trim() || state.running || !controls.server || !controls.valid) return;
  $("message").value = "";
  const stopper = new AbortController();
  $("message").focus();
  running(stopper);
  const turn = new Turn(said, controls.body([...state.turns.flatMap((each) => each.messages), { role: "user", content: said }]));
  state.turns.push(turn);
  follow();
  // One after the other: at the same time they would share passes, and neither would have its own speed.
  const compares = controls.compares, whole = await answer(turn, controls.method, turn.body, stopper.signal);
  if (whole && compares) {
    const { prediction, ...plain } = turn.body;
    if (await answer(turn, "off", { ...plain, speculation: "off" }, stopper.signal)) turn.compare();
  }
  running(null);
  if (!state.turns.includes(turn)) return; // cleared meanwhile
  tell(turn.verdict || turn.views.map((view) => (view.error ? `Ended: ${view.error}.` : `Done: ${view.rate.textContent}.`)).join(" "));
  if (atEnd()) follow();
}

// Runs a request to its end; returns whether the answer is whole.
async function answer(turn, method, body, signal) {
  const view = turn.add(method);
  tell(`Answering, ${view.title}.`);
  try {
    for await (const chunk of client.chat(body, signal)) {
      const near = atEnd();
      view.take(chunk);
      if (near) follow();
    }
    view.end();
    return true;
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    view.end(signal.aborted ? "stopped" : error.message);
    return false;
  }
}

function running(stopper) {
  state.running = stopper;
  if (document.activeElement === $("stop-answer")) $("message").focus(); // a button that is disabled loses the focus
  $("send").disabled = stopper !== null;
  $("stop-answer").disabled = stopper === null;
  $("log").setAttribute("aria-busy", stopper !== null);
}
function stop() { state.running?.abort(); }

// What scrolls: on a narrow page all of it.
function scroller() { return getComputedStyle($("log")).overflowY === "visible" ? document.scrollingElement : $("log"); }
function atEnd() {
  const { scrollTop, clientHeight, scrollHeight } = scroller();
  return scrollTop + clientHeight > scrollHeight - NEAR;
}
function follow() { scroller().scrollTop = scroller().scrollHeight; }

// Shows the pass of a token.
function choose(view, number, index) {
  if (state.chosen && state.chosen.view !== view) state.chosen.view.leave();
  state.chosen = { view, number };
  $("pass-box").classList.remove("empty");
  state.pane.show(view.trace.passes[number], number, view.trace.passes.length, index);
}
function goPass(step) {
  const { view, number } = state.chosen ?? {};
  if (view?.groups[number + step]) view.show(number + step);
}

function hidePass() {
  if ($("pass-box").contains(document.activeElement)) $("message").focus(); // what is hidden loses the focus
  state.chosen?.view.leave();
  state.chosen = null;
  state.pane?.pin(false);
  state.pane?.clear();
  $("pass-box").classList.add("empty");
}

function clear() {
  stop();
  hidePass();
  state.turns = [];
  $("log").querySelectorAll(".exchange").forEach((turn) => turn.remove());
  $("empty").hidden = false;
  tell("The conversation is empty.");
  $("message").focus();
}

const FILES = {
  json: () => download("conversation.json", "application/json", asJSON(controls.server.model, controls.system, state.turns)),
  markdown: () => download("conversation.md", "text/markdown", asMarkdown(controls.server.model, controls.system, state.turns)),
  trace: () => download("trace.jsonl", "application/jsonl", asTrace(state.turns)),
};

$("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (state.running) stop();
  else if (state.pane?.pinned) state.pane.pin(false);
  else hidePass();
});
$("stop-answer").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
for (const [kind, save] of Object.entries(FILES))
  $(`save-${kind}`).addEventListener("click", () => (state.turns.length ? save() : tell("There is nothing to save yet.")));
$("key").addEventListener("change", () => { client.key.set($("key").value); connect(); });
$("key").value = client.key.get();
connect();
