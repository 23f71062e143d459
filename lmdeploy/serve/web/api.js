// Requests to the server, with the API key if one is set.

const KEY = "api_key";
const CLOSED = "The server closed the connection before the answer was complete.";
let key = sessionStorage.getItem(KEY) ?? "";
let askForKey = async () => false;
let onLost = () => {};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Set the function that asks the user for a key. It returns whether the user gave one. */
export function onMissingKey(ask) {
  let asking = null; // requests that fail at the same time share one question
  askForKey = () => (asking ??= ask(key !== "").finally(() => (asking = null)));
}

/** Set the function that follows when the server does not answer, or answers that it cannot. */
export function onLostServer(follow) {
  onLost = follow;
}

/** Return an error for the user if the network failed, else the error itself. */
function explained(error, message) {
  if (!(error instanceof TypeError)) {
    return error; // AbortError
  }
  onLost();
  return new ApiError(0, message);
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem(KEY, value);
}

/** Send a request and return the response. A body makes it a POST. Throws ApiError. */
export async function request(path, { body, signal } = {}) {
  const used = key;
  const headers = used === "" ? {} : { Authorization: `Bearer ${used}` };
  const options = { headers, signal };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options).catch((error) => {
    throw explained(error, "The server does not answer.");
  });
  if (response.status === 401 && (used !== key || (await askForKey()))) {
    return request(path, { body, signal });
  }
  if (response.status === 503) {
    onLost();
  }
  if (!response.ok) {
    const json = await response.json().catch(() => null);
    throw new ApiError(response.status, json?.error?.message ?? `HTTP ${response.status}`);
  }
  return response;
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

/** Yield the JSON of each server-sent event until [DONE]. */
export async function* events(path, options) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw explained(error, CLOSED);
      });
      if (done) {
        onLost();
        throw new ApiError(0, CLOSED);
      }
      const parts = (buffer + value).split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data:")) {
          continue; // a comment, which keeps the connection open
        }
        const data = part.slice("data:".length).trim();
        if (data === "[DONE]") {
          return;
        }
        const json = JSON.parse(data);
        if (json.error) {
          throw new ApiError(json.error.code, json.error.message);
        }
        yield json;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
