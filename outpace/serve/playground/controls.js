// The settings of the page: from the form to the body of a request.

const { make } = parts;
const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const OFF = "plain";

export class Controls {
  constructor(form) {
    this.form = form;
    this.server = null;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.show());
    $("method").addEventListener("change", () => this.showOptions());
  }

  // Offers what the server has.
  offer(server) {
    this.server = server;
    $("method").replaceChildren(...Object.keys(server.methods).map((name) => {
      const shown = name === OFF ? "off" : name;
      return Object.assign(make("option", "", name === server.method ? `${shown} (the server's default)` : shown), { value: name });
    }));
    $("method").value = server.method;
    for (const [name, usual] of Object.entries(server.sampling)) $(name).placeholder = usual;
    $("max_tokens").placeholder = `up to ${server.most_tokens}`;
    this.showOptions();
  }

  showOptions() {
    const { about, options } = this.server.methods[$("method").value];
    $("about-method").textContent = about;
    $("options").hidden = !options.length;
    $("options").replaceChildren(make("legend", "", "Options of the method"), ...options.map((option) => {
      const label = make("label", "", option.name), input = make("input");
      Object.assign(input, { type: "number", step: option.whole ? 1 : "any", placeholder: option.usual ?? "auto", max: option.most });
      if (option.least !== null) input.min = option.least;
      input.dataset.option = option.name;
      label.append(input);
      return label;
    }));
    this.show();
  }

  // Says in the closed panel which settings differ from the defaults.
  show() {
    $("compare").disabled = this.off;
    const given = [...this.form.querySelectorAll("#more input, #more textarea")].filter((field) => (field.type === "checkbox" ? field.checked : field.value));
    $("chosen").textContent = given.length ? given.map((field) => field.dataset.option ?? field.name).join(", ") : "the server's defaults";
  }

  get remembers() { return this.server.methods[$("method").value].remembers; }
  get off() { return $("method").value === OFF; }
  get compares() { return $("compare").checked && !this.off; }
  get method() { return this.off ? "off" : $("method").value; }
  get options() {
    const filled = [...$("options").querySelectorAll("input")].filter((input) => input.value);
    return Object.fromEntries(filled.map((input) => [input.dataset.option, Number(input.value)]));
  }
  get valid() {
    const wrong = [...this.form.elements].find((field) => !field.checkValidity());
    if (wrong) {
      $("more").open = true;
      wrong.reportValidity();
    }
    return !wrong;
  }

  // The body of a request for the next answer, with a seed of its own if none is given.
  body(messages) {
    const body = { messages: [...this.system, ...messages], stream: true, stream_options: { include_usage: true } };
    for (const name of NUMBERS) if ($(name).value) body[name] = Number($(name).value);
    body.seed = $("seed").value ? Number($("seed").value) : crypto.getRandomValues(new Uint32Array(1))[0];
    const stops = $("stop").value.split("\n").filter(Boolean);
    if (stops.length) body.stop = stops;
    if ($("prediction").value) body.prediction = { type: "content", content: $("prediction").value };
    if (this.server.traces) body.return_trace = $("probs").checked ? "probs" : true;
    const options = this.options;
    if (this.off) body.speculation = "off";
    else if ($("method").value !== this.server.method || Object.keys(options).length) body.speculation = { method: $("method").value, options };
    return body;
  }
  get system() {
    return $("system").value ? [{ role: "system", content: $("system").value }] : [];
  }
}
