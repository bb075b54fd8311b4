"use strict";
// What the trace viewer and the playground have in common: tokens in the colours of who proposed them, and the view of a
// pass with its tree. Passes refer by number to `words`: sources, reasons and phases, and pieces by token.
// Text of models and users is untrusted: it only ever goes into a page through textContent.
const parts = (() => {
  const COLOURS = 8, TARGET = -1;
  const VERDICTS = { accepted: "✓", rejected: "✗", never: "○" };
  const COLUMNS = [
    ["tree"], ["proposed by"], ["draft", "number draft", "the draft's probability"], ["target", "number target", "the target's probability"],
    ["choice", "choice", "what the target chose after this node"], ["why"],
  ];

  function make(tag, name, text) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : word.endsWith("s") ? "es" : "s"}`;
  const seconds = (s) => (s < 0.1 ? `${(1000 * s).toFixed(1)} ms` : `${s.toFixed(2)} s`);
  // Shows spaces as signs, and a long run of them as one sign with its length.
  function visible(text) {
    const spaces = text.replace(/ {4,}| /g, (run) => (run.length > 1 ? `␣×${run.length} ` : "␣"));
    return text === "" ? "∅" : spaces.replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "⇥");
  }
  const colour = (source) => (source === TARGET ? "" : `s${source % COLOURS}`);
  const who = (words, source) => (source === TARGET ? "the target's own choice" : words.sources[source]);
  function prob(p) {
    if (p === undefined || p === null) return "";
    return p >= 0.0005 ? p.toFixed(3) : "< 0.001";
  }
  function swatch(name, text) {
    const item = make("li");
    item.append(make("span", `swatch ${name}`), text);
    return item;
  }
  function legend(words, proposers, own) {
    const items = proposers.map((p) => swatch(colour(p.source), `${words.sources[p.source]} · ${p.accepted} of ${p.drafted} accepted`));
    return [...items, swatch("none", `the target's own choice · ${own}`)];
  }

  // The tokens that a pass committed, numbered from `first` on.
  function passGroup(words, pass, { number, first, role }) {
    const group = make("span", "pass");
    pass.committed.forEach((_, i) => {
      const text = pass.text[i], source = pass.sources[i];
      const span = make("span", `token ${colour(source)}`, text);
      if (text === "") span.classList.add("empty");
      if (text.startsWith("\n")) span.classList.add("break");
      span.dataset.pass = number;
      span.dataset.token = first + i;
      span.tabIndex = -1;
      span.setAttribute("aria-label", `${visible(text)}, ${who(words, source)}, pass ${number + 1}`);
      span.setAttribute("role", role);
      group.append(span);
    });
    return group;
  }

  // Lets the pointer and the keyboard choose tokens. `on` has place(), which says where one is, select(span), toToken(index)
  // and toPass(number); `view` is the PassView, which can be pinned.
  function listenToTokens(answer, view, on) {
    const tokenOf = (event) => event.target.closest?.(".token");
    answer.addEventListener("pointerover", (event) => { const span = tokenOf(event); if (span && !view.pinned) on.select(span); });
    answer.addEventListener("focusin", (event) => { const span = tokenOf(event); if (span) on.select(span); });
    answer.addEventListener("click", (event) => {
      const span = tokenOf(event);
      if (!span) return;
      on.select(span);
      view.pin(true);
    });
    answer.addEventListener("keydown", (event) => {
      const at = on.place(), turn = () => view.pin(!view.pinned);
      const moves = {
        ArrowRight: () => on.toToken(at.token + 1), ArrowLeft: () => on.toToken(at.token - 1),
        ArrowDown: () => on.toPass(at.pass + 1), ArrowUp: () => on.toPass(at.pass - 1),
        Home: () => on.toToken(0), End: () => on.toToken(at.tokens - 1), Enter: turn, " ": turn,
      };
      if (!moves[event.key]) return;
      event.preventDefault();
      moves[event.key]();
    });
  }

  // Fills a box with one pass: its name, figures, times and tree.
  class PassView {
    constructor(box, words) {
      this.words = words;
      this.pinned = false;
      this.name = make("h2");
      this.name.id = "pass-name";
      this.name.setAttribute("aria-live", "polite");
      this.before = this.button("before", "‹", "Previous pass");
      this.after = this.button("after", "›", "Next pass");
      this.pinner = this.button("pin", "pin");
      this.pinner.addEventListener("click", () => this.pin(!this.pinned));
      const line = make("div", "line"), steps = make("span"), facts = make("div", "facts small");
      steps.append(this.before, " ", this.after);
      line.append(this.name, steps, this.pinner);
      this.facts = make("p");
      this.facts.id = "pass-facts";
      this.times = make("ul", "keys");
      this.times.id = "pass-times";
      facts.append(this.facts, this.times);
      box.replaceChildren(line, facts, this.makeTable());
      this.pin(false);
    }
    button(id, text, label) {
      const button = make("button", "", text);
      button.id = id;
      button.type = "button";
      if (label) button.setAttribute("aria-label", label);
      return button;
    }
    makeTable() {
      const head = make("tr"), thead = make("thead");
      this.table = make("table");
      this.tree = make("tbody");
      this.tree.id = "tree";
      for (const [name, kind, title] of COLUMNS) {
        const cell = make("th", kind, name);
        if (title) cell.title = title;
        head.append(cell);
      }
      thead.append(head);
      this.table.append(thead, this.tree);
      return this.table;
    }

    pin(pinned) {
      this.pinned = pinned;
      this.pinner.textContent = pinned ? "pinned" : "pin";
      this.pinner.setAttribute("aria-pressed", pinned);
    }
    clear() {
      this.name.textContent = "No pass";
      this.before.disabled = this.after.disabled = this.pinner.disabled = true;
      this.facts.textContent = "";
      this.times.replaceChildren();
      this.tree.replaceChildren();
    }
    // Shows pass `number` of `count`; `index` is the place of a chosen token among those that it committed, or null.
    show(pass, number, count, index) {
      this.name.textContent = `Pass ${number + 1} of ${count}`;
      this.before.disabled = number === 0;
      this.after.disabled = number + 1 === count;
      this.pinner.disabled = false;
      this.facts.textContent = [
        `${plural(pass.committed.length, "token")} committed`, `${pass.accepted} of ${pass.tokens.length - 1} draft tokens accepted`,
        pass.rows === 1 ? "not shared with other requests" : `shared by ${pass.rows} requests`, `ended at ${pass.at.toFixed(3)} s`,
        ...(pass.decision ? [pass.decision] : []),
      ].join(" · ");
      this.times.replaceChildren(...this.words.phases.map((name, i) => swatch(`p${i}`, `${name} ${seconds(pass.seconds[i])}`)));
      this.showTree(pass, index);
    }

    showTree(pass, index) {
      const children = pass.tokens.map(() => []), depths = [0];
      pass.parents.forEach((parent, node) => { if (parent >= 0) { children[parent].push(node); depths[node] = depths[parent] + 1; } });
      const indent = Math.max(4, Math.min(14, 90 / Math.max(...depths, 1)));
      const step = new Map(pass.path.map((node, i) => [node, i]));
      // The node of the token or, if no method proposed it, the node where the target chose it.
      const chosen = index === null ? null : pass.sources[index] === TARGET ? pass.path[index] : pass.path[index + 1];
      const rows = [], stack = [{ node: 0, rails: [] }];
      while (stack.length) {
        const { node, rails } = stack.pop(), below = children[node];
        rows.push(this.treeRow(pass, node, { rails, indent, at: step.get(node), chosen: node === chosen }));
        const outer = rails.map((rail) => (rail.includes("last") || rail === "rail" ? "rail" : "rail through"));
        for (let i = below.length - 1; i >= 0; i--)
          stack.push({ node: below[i], rails: [...outer, i === below.length - 1 ? "rail turn last" : "rail turn"] });
      }
      this.tree.replaceChildren(...rows);
      this.table.classList.toggle("no-draft", !Object.keys(pass.draft).length);
      this.table.classList.toggle("no-target", !Object.keys(pass.target).length);
    }
    treeRow(pass, node, { rails, indent, at, chosen }) {
      const why = this.words.reasons[pass.why[node]], verdict = why.split(" ")[0].replace(":", "");
      const row = make("tr", `${verdict}${chosen ? " chosen" : ""}`), cell = make("td", "node"), choice = make("td", "choice");
      rails.forEach((rail, i) => {
        const box = make("span", rail);
        box.style.left = `${i * indent}px`;
        box.style.width = `${indent}px`;
        cell.append(box);
      });
      cell.style.paddingLeft = `${rails.length * indent}px`;
      cell.append(make("span", "verdict", VERDICTS[verdict] ?? "●"), this.piece(pass.tokens[node], pass.by[node]));
      row.append(cell, make("td", "by", node === 0 ? "" : who(this.words, pass.by[node])));
      row.append(make("td", "number draft", prob(pass.draft[node])), make("td", "number target", prob(pass.target[node])));
      if (at !== undefined && at < pass.committed.length) {
        choice.append(this.piece(pass.committed[at], pass.sources[at]), ` ${prob(pass.choices[node])}`);
      }
      row.append(choice, make("td", "why", why));
      return row;
    }
    piece(token, source) {
      const span = make("span", `piece ${colour(source) || "own"}`, visible(this.words.pieces[token]));
      span.title = `token ${token}`;
      return span;
    }
  }

  return { TARGET, make, plural, seconds, visible, colour, who, swatch, legend, passGroup, listenToTokens, PassView };
})();
