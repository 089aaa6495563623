// What the page asks the server: JSON with the token in a header, and the stream of events over fetch.

const KEY = "lockstep-token";

/** Takes the token out of the address into this tab's session storage, so that no copied link holds it. */
export function takeToken() {
  const query = new URLSearchParams(location.hash.slice(1));
  if (query.has("token")) {
    sessionStorage.setItem(KEY, query.get("token"));
    query.delete("token");
    const rest = query.toString();
    history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
  }
}

export const setToken = (token) => sessionStorage.setItem(KEY, token);
const headers = () => ({ Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}` });

export class ServerError extends Error {
  constructor(status, body) {
    const error = (body && body.error) || {};
    super(error.message || (body && body.detail) || `the server answered ${status}`);
    this.status = status;
    this.remedy = typeof error.remedy === "string" ? error.remedy : "";
  }
}

/** The JSON at `path`. Lists in `query` repeat their name; null and undefined are left out. */
export async function get(path, query = {}, signal = undefined) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") parts.append(name, each);
    }
  }
  const asked = parts.toString();
  const answer = await fetch(`/api/${path}${asked ? `?${asked}` : ""}`, { headers: headers(), signal, cache: "no-store" });
  const body = await answer.json().catch(() => null);
  if (!answer.ok) throw new ServerError(answer.status, body);
  return body;
}

export const ofRun = (id, part) => `runs/${encodeURIComponent(id)}/${part}`;
export const aborted = (error) => error instanceof DOMException && error.name === "AbortError";

const SILENT_MS = 25000;
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 10000;

/**
 * The server's events, read until `stop`. It reconnects with growing pauses and names the last event that it has seen.
 * A stream that sends no byte for 25 s (the server beats every 10 s) counts as broken.
 *
 * @param {(kind: string, data: object) => void} onEvent
 * @param {(state: "live"|"stale", since: number|null, error: Error|null) => void} onState `since` in unix seconds
 */
export class EventStream {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.lastId = null;
    this.heard = null;
    this.abort = null;
  }

  start(runs) {
    this.stop();
    this.abort = new AbortController();
    this.follow(runs, this.abort.signal);
  }

  stop() {
    if (this.abort) this.abort.abort();
    this.abort = null;
  }

  async follow(runs, stopped) {
    let pause = FIRST_PAUSE_MS;
    while (!stopped.aborted) {
      let failure = null;
      try {
        await this.read(runs, stopped, () => { pause = FIRST_PAUSE_MS; });
      } catch (error) {
        failure = error;
      }
      if (stopped.aborted) return;
      this.onState("stale", this.heard, failure);
      await new Promise((done) => setTimeout(done, pause * (0.8 + 0.4 * Math.random())));
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }

  async read(runs, stopped, onByte) {
    const silence = new AbortController();
    const give = () => silence.abort();
    stopped.addEventListener("abort", give, { once: true });
    let timer = setTimeout(give, SILENT_MS);
    try {
      const query = new URLSearchParams(runs.map((run) => ["run", run]));
      const extra = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
      const answer = await fetch(`/api/events?${query}`, { headers: { ...headers(), ...extra }, signal: silence.signal, cache: "no-store" });
      if (!answer.ok) throw new ServerError(answer.status, await answer.json().catch(() => null));
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      this.onState("live", null, null);
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(give, SILENT_MS);
        this.heard = Date.now() / 1000;
        onByte();
        const blocks = (rest + value).split(/\r?\n\r?\n/);
        rest = blocks.pop();
        blocks.forEach((block) => this.take(block));
      }
    } finally {
      clearTimeout(timer);
      stopped.removeEventListener("abort", give);
      silence.abort();
    }
  }

  take(block) {
    let kind = "message";
    const data = [];
    for (const line of block.split(/\r?\n/)) {
      if (line.startsWith("event:")) kind = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line.startsWith("id:")) this.lastId = line.slice(3).trim();
    }
    if (!data.length) return;
    let read;
    try { read = JSON.parse(data.join("\n")); } catch { return; }
    this.onEvent(kind, read);
  }
}
