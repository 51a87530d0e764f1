// Requests to the server: the API key, errors, and server-sent events. All paths are relative to the page.

const STORED = "jaxspec.key";

export const storedKey = () => sessionStorage.getItem(STORED) ?? "";
export const storeKey = (key) => sessionStorage.setItem(STORED, key);

/** An answer other than 200. `status` is the HTTP status. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Fetch a route; `body` is sent as JSON. Throws `ServerError`, and what `fetch` throws. */
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (storedKey()) headers.Authorization = `Bearer ${storedKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  if (response.ok) return response;
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's error page: the status has to do.
  }
  throw new ServerError(response.status, message);
}

/** The JSON objects of a stream of server-sent events, until it ends or says [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line === "data: [DONE]") return;
      if (line) yield JSON.parse(line.slice("data: ".length));
    }
  }
}
