// The conversation as a file: JSON, Markdown, or a trace that `outpace show` opens.

export function asJSON(model, system, turns) {
  const answers = (turn) => turn.views.map((view) => ({
    title: view.title, content: view.content, finish_reason: view.finish, error: view.error, metrics: view.metrics,
  }));
  return JSON.stringify({
    model,
    messages: [...system, ...turns.flatMap((turn) => turn.messages)],
    turns: turns.map((turn) => ({ request: turn.body, answers: answers(turn), verdict: turn.verdict })),
  }, null, 2);
}

export function asMarkdown(model, system, turns) {
  const said = system.map((message) => `## System\n\n${message.content}\n`);
  for (const turn of turns) {
    said.push(`## User\n\n${turn.said}\n`);
    for (const view of turn.views) {
      const figures = [view.title, `seed ${turn.body.seed}`, view.rate.textContent, view.error].filter(Boolean).join(" · ");
      said.push(`## Answer\n\n${view.content}\n\n*${figures}*\n`);
    }
    if (turn.verdict) said.push(`*${turn.verdict}*\n`);
  }
  return `# Conversation with ${model}\n\n${said.join("\n")}`;
}

// One trace of all answers: each is a request of its own, numbered anew.
export function asTrace(turns) {
  const traces = turns.flatMap((turn) => turn.views).map((view) => view.trace.lines).filter((lines) => lines.length);
  const lines = traces.slice(0, 1).map(([header]) => header);
  traces.forEach((trace, number) => {
    for (const line of trace.slice(1)) {
      const place = line.type === "request" ? { id: number } : "request" in line ? { request: number } : {};
      lines.push({ ...line, ...place });
    }
  });
  return lines.map((line) => `${JSON.stringify(line)}\n`).join("");
}

export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000); // the browser reads it soon, not now
}
