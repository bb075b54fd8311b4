// Asks the server that this page came from.

const KEY = "outpace-key"; // in sessionStorage, so that the browser forgets it with the tab

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Says in words that a connection failed; browsers have words of their own for it.
async function connected(work) {
  try {
    return await work;
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(0, "the connection to the server broke off");
  }
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}) };
  const reply = await connected(fetch(path, { ...options, headers }));
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => null);
  throw new ServerError(reply.status, said?.error?.message ?? `the server answers ${reply.status}`);
}

export async function settings() {
  return (await ask("/playground/settings")).json();
}

// Yields the chunks of a streamed chat.
export async function* chat(body, signal) {
  const reply = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await connected(reader.read());
    if (done) throw new ServerError(0, "the server closed the connection");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(0, chunk.error.message);
      yield chunk;
    }
  }
}
