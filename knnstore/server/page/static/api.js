// What the page asks of its server. The key stays in this tab.

const KEPT = "knnstore-key";

let key = sessionStorage.getItem(KEPT) ?? "";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(given) {
  key = given;
  sessionStorage.setItem(KEPT, key);
}

// What a server sends may also end in its midst.
async function reached(sent) {
  try {
    return await sent;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
}

async function send(method, path, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const answer = await reached(fetch(path, { method, headers, signal, body: body && JSON.stringify(body) }));
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new ApiError(answer.status, said?.error?.message ?? `The server answered ${answer.status}.`);
}

export async function call(method, path, body, signal) {
  return reached((await send(method, path, body, signal)).json());
}

// The pieces of a text as it is written.
export async function* written(body, signal) {
  const answer = await send("POST", "/v1/completions", { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { value, done } = await reached(reader.read());
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) throw new ApiError(500, part.error.message);
      for (const choice of part.choices) yield choice.text;
    }
  }
}
