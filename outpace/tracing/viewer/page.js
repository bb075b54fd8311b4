// The trace viewer. What it shares with other pages stands in parts.js.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const { make, plural, seconds, swatch } = parts;
  const view = new parts.PassView($("pass-box"), data);
  const SVG = "http://www.w3.org/2000/svg";
  const TIP = 8, UPPER = 118, GAP = 14, LOWER = 40, AXIS = 18, LEAST_SLOT = 3, MOST_SLOT = 26;
  const state = { request: null, pass: 0, token: 0, spans: [], groups: [], starts: [], marked: {}, slot: 1 };

  function draw(tag, attributes, text) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

  function showHeader() {
    const t = data.totals;
    document.title = `${data.model} – Outpace trace`;
    $("model").textContent = data.model;
    $("lossless").textContent = data.lossless ? "lossless" : "LOSSY";
    $("lossless").classList.toggle("lossy", !data.lossless);
    $("about").textContent = [`method ${data.methods}`, `verifier ${data.verifiers}`, data.versions].join(" · ");
    const tiles = {
      tokens: t.tokens.toLocaleString("en"), passes: t.passes.toLocaleString("en"), "tokens per pass": t.tokens_per_pass.toFixed(2),
      "accepted / drafted": `${t.accepted.toLocaleString("en")} / ${t.drafted.toLocaleString("en")}`, "time in passes": seconds(t.seconds),
    };
    if (data.requests.length > 1) tiles.requests = data.requests.length.toLocaleString("en");
    for (const [name, value] of Object.entries(tiles)) {
      const tile = make("div");
      if (name === "passes") tile.title = "a pass that several requests shared counts for each of them";
      tile.append(make("dt", "", name), make("dd", "", value));
      $("totals").append(tile);
    }
    data.requests.forEach((request, i) => {
      const option = make("option", "", `${request.id}: ${request.method}, ${plural(request.stats.tokens, "token")}, ${request.end}`);
      option.value = i;
      $("request").append(option);
    });
    $("picker").hidden = data.requests.length < 2;
    data.phases.forEach((name, i) => $("phases").append(swatch(`p${i}`, name)));
  }

  function showRequest(index) {
    const request = (state.request = data.requests[index]);
    Object.assign(state, { pass: 0, token: 0 });
    view.pin(false);
    const s = request.stats;
    const several = [
      request.method, `verifier ${request.verifier}`, request.lossless ? "lossless" : "LOSSY", `${plural(s.tokens, "token")} in ${plural(s.passes, "pass")}`,
      `${s.tokens_per_pass.toFixed(2)} tokens per pass`, `${s.accepted} of ${s.drafted} draft tokens accepted`,
    ];
    $("settings").textContent = [
      ...(data.requests.length > 1 ? several : []), `policy ${request.policy}`, request.settings, `ended: ${request.end}`,
      ...(request.error ? [request.error] : []),
    ].join(" · ");
    $("prompt").open = false;
    $("prompt").querySelector("summary").textContent = `Prompt (${plural(request.prompt_tokens, "token")})`;
    $("prompt").querySelector("pre").textContent = request.prompt;
    showLegend(request);
    showAnswer(request);
    showDepths(request.stats);
    showTimeline();
    select(0, 0);
  }

  function showLegend(request) {
    $("legend").replaceChildren(...parts.legend(data, request.proposers, request.own));
  }

  function showAnswer(request) {
    state.groups = []; state.starts = [];
    let first = 0;
    for (const [number, pass] of request.passes.entries()) {
      state.starts.push(first);
      state.groups.push(parts.passGroup(data, pass, { number, first, role: "button" }));
      first += pass.committed.length;
    }
    state.spans = state.groups.flatMap((group) => [...group.children]);
    $("answer").replaceChildren(...state.groups.filter((group) => group.firstChild));
  }

  function showDepths(stats) {
    const cells = [];
    stats.offered.forEach((offered, i) => {
      const track = make("div", "track"), bar = make("div", "bar"), share = stats.matched[i] / offered;
      bar.style.width = `${100 * share}%`;
      track.append(bar);
      cells.push(make("span", "", `depth ${i + 1}`), track, make("span", "", `${(100 * share).toFixed(0)} %`),
        make("span", "muted", `${stats.matched[i]} of ${offered}`));
    });
    $("depths").replaceChildren(...(cells.length ? cells : [make("span", "muted", "Nothing was drafted.")]));
  }

  // Draws one path per phase, however many passes there are; the pass under the pointer follows from its position.
  function showTimeline() {
    const passes = state.request.passes, room = $("plot").clientWidth;
    if (!passes.length) { $("plot").replaceChildren(); $("scale").textContent = "There are no passes."; return; }
    const slot = (state.slot = Math.max(LEAST_SLOT, Math.min(MOST_SLOT, room / passes.length)));
    const thick = Math.max(1, slot - (slot > 5 ? 2 : 0.5)), width = Math.max(room, slot * passes.length);
    const totals = passes.map((pass) => sum(pass.seconds)), ordered = [...totals].sort((a, b) => a - b);
    const longest = ordered[ordered.length - 1], limit = Math.min(longest, 1.5 * ordered[Math.floor(0.95 * (ordered.length - 1))]) || 1;
    const most = Math.max(1, ...passes.map((pass) => pass.committed.length));
    const base = UPPER + GAP + LOWER, svg = draw("svg", { width, height: base + AXIS, tabindex: 0, role: "slider", "aria-label": "Pass" });
    const paths = data.phases.map(() => []), counts = [], over = [];
    passes.forEach((pass, i) => {
      let top = UPPER;
      pass.seconds.forEach((spent, phase) => {
        const height = Math.min((spent / limit) * (UPPER - TIP), top - TIP);
        if (height > 0) paths[phase].push(`M${i * slot} ${top}h${thick}v${-height}h${-thick}z`);
        top -= height;
      });
      if (totals[i] > limit * 1.0001) over.push(`M${i * slot} ${TIP - 1}l${thick / 2} ${2 - TIP}l${thick / 2} ${TIP - 2}z`);
      const height = (pass.committed.length / most) * LOWER;
      counts.push(`M${i * slot} ${base}h${thick}v${-height}h${-thick}z`);
    });
    svg.append(draw("rect", { class: "mark", id: "mark", y: 0, width: slot, height: base }));
    paths.forEach((path, i) => svg.append(draw("path", { class: `p${i}`, d: path.join("") })));
    svg.append(draw("path", { class: "over", d: over.join("") }), draw("path", { class: "count", d: counts.join("") }));
    for (const y of [UPPER, base]) svg.append(draw("line", { class: "axis", x1: 0, x2: width, y1: y + 0.5, y2: y + 0.5 }));
    const every = Math.ceil(96 / slot);
    for (let i = 0; i < passes.length && i * slot < width - 90; i += every)
      svg.append(draw("text", { x: i * slot, y: base + 13 }, `${i + 1} · ${passes[i].at.toFixed(2)} s`));
    svg.setAttribute("aria-valuemin", 1);
    svg.setAttribute("aria-valuemax", passes.length);
    $("plot").replaceChildren(svg);
    $("scale").textContent = `Top: time of each pass, full height ${seconds(limit)}` + (over.length ? `, red tips mark longer passes (up to ${seconds(longest)})` : "") +
      `. Bottom: committed tokens, at most ${most}. Labels: pass · seconds since the trace began.`;
  }

  // Selects a pass, and optionally one of its tokens.
  function select(number, token = null) {
    const request = state.request, pass = request.passes[number];
    state.marked.group?.classList.remove("chosen");
    state.marked.span?.classList.remove("chosen");
    if (state.marked.span) state.marked.span.tabIndex = -1;
    if (!pass) return view.clear();
    const first = state.starts[number];
    Object.assign(state, { pass: number, token: token ?? Math.min(first, state.spans.length - 1) });
    const group = state.groups[number], span = state.spans[state.token];
    group.classList.add("chosen");
    if (span) span.tabIndex = 0;
    if (token !== null && span) span.classList.add("chosen");
    state.marked = { group, span };
    const mark = $("mark"), svg = mark.parentNode;
    mark.setAttribute("x", number * state.slot - 0.5);
    svg.setAttribute("aria-valuenow", number + 1);
    view.show(pass, number, request.passes.length, token === null ? null : token - first);
  }

  // Scrolls only inside the boxes: the page itself stays in place.
  function revealText() {
    const box = $("answer"), group = state.groups[state.pass];
    if (group.firstChild && (group.offsetTop < box.scrollTop || group.offsetTop + 30 > box.scrollTop + box.clientHeight))
      box.scrollTop = group.offsetTop - box.clientHeight / 3;
  }
  function revealBar() {
    const plot = $("plot"), x = state.pass * state.slot;
    if (x < plot.scrollLeft || x + state.slot > plot.scrollLeft + plot.clientWidth) plot.scrollLeft = x - plot.clientWidth / 2;
  }
  function goPass(number, focus) {
    number = Math.max(0, Math.min(state.request.passes.length - 1, number));
    const filled = state.request.passes[number]?.committed.length > 0;
    select(number, focus && filled ? state.starts[number] : null);
    revealText();
    revealBar();
    if (focus && filled) state.spans[state.token].focus({ preventScroll: true });
  }
  function goToken(index) {
    const span = state.spans[Math.max(0, Math.min(state.spans.length - 1, index))];
    if (!span) return;
    span.focus({ preventScroll: true });
    revealText();
  }
  function selectToken(span) {
    select(Number(span.dataset.pass), Number(span.dataset.token));
    revealBar();
  }

  function listenToAnswer() {
    parts.listenToTokens($("answer"), view, {
      place: () => ({ token: state.token, pass: state.pass, tokens: state.spans.length }),
      select: selectToken, toToken: goToken, toPass: (number) => goPass(number, true),
    });
  }

  function listenToPlot() {
    const plot = $("plot");
    const at = (event) => {
      const number = Math.floor((event.clientX - plot.firstChild.getBoundingClientRect().left) / state.slot);
      return number >= 0 && number < state.request.passes.length ? number : null;
    };
    plot.addEventListener("pointermove", (event) => {
      const number = at(event);
      if (number === null || view.pinned || number === state.pass) return;
      select(number);
      revealText();
    });
    plot.addEventListener("click", (event) => { const number = at(event); if (number !== null) { goPass(number, false); view.pin(true); } });
    plot.addEventListener("keydown", (event) => {
      const last = state.request.passes.length - 1;
      const to = { ArrowRight: state.pass + 1, ArrowUp: state.pass + 1, ArrowLeft: state.pass - 1, ArrowDown: state.pass - 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      goPass(to, false);
    });
    let waiting;
    window.addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { showTimeline(); if (state.request.passes.length) $("mark").setAttribute("x", state.pass * state.slot - 0.5); }, 100);
    });
  }

  function start() {
    showHeader();
    $("none").hidden = data.requests.length > 0;
    $("shown").hidden = $("prompt").hidden = data.requests.length === 0;
    if (!data.requests.length) return;
    listenToAnswer();
    listenToPlot();
    view.before.addEventListener("click", () => goPass(state.pass - 1, false));
    view.after.addEventListener("click", () => goPass(state.pass + 1, false));
    $("request").addEventListener("change", () => showRequest(Number($("request").value)));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") view.pin(false); });
    showRequest(0);
  }
  start();
})();
