// The chat: streams an answer, and colours the tokens that were accepted drafts.

import { call, events } from "./api.js";
import { byId, duration, element, percent, tokens } from "./dom.js";

export class Chat {
  /** `onId` is called with the id of an answer, `onUnauthorized` when the server wants a key. */
  constructor({ onId, onUnauthorized }) {
    this.onId = onId;
    this.onUnauthorized = onUnauthorized;
    this.history = [];
    this.abort = null;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("composer").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("new-chat").addEventListener("click", () => {
      this.abort?.abort();
      this.history = [];
      byId("messages").replaceChildren();
      byId("prompt").focus();
    });
  }

  /** The fields of a request that the settings set. */
  settings() {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    const slo = { tpot_ms: number("tpot"), ttft_ms: number("ttft") };
    return {
      model: byId("model").value || undefined,
      temperature: number("temperature"),
      max_tokens: number("max-tokens"),
      seed: number("seed"),
      slo: slo.tpot_ms || slo.ttft_ms ? slo : undefined,
    };
  }

  async send() {
    const prompt = byId("prompt").value.trim();
    if (!prompt || this.abort) return;
    const history = this.history;
    history.push({ role: "user", content: prompt });
    byId("prompt").value = "";
    show("user", "You").append(prompt);
    const answer = new Answer(show("assistant", "Model"));
    this.abort = new AbortController();
    this.busy(true);
    try {
      await this.stream(history, answer);
      answer.finish();
    } catch (error) {
      if (error.status === 401) this.onUnauthorized();
      answer.fail(error.name === "AbortError" ? "Stopped." : error.message);
    } finally {
      this.abort = null;
      this.busy(false);
    }
    if (answer.text) history.push({ role: "assistant", content: answer.text });
    else history.pop();
  }

  async stream(history, answer) {
    const system = byId("system").value.trim();
    const messages = system ? [{ role: "system", content: system }, ...history] : history;
    const options = { stream: true, stream_options: { include_usage: true }, return_accepted_drafts: true };
    const body = { ...this.settings(), ...options, messages };
    const response = await call("v1/chat/completions", { body, signal: this.abort.signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (!answer.id) this.onId((answer.id = chunk.id));
      answer.add(chunk);
    }
  }

  busy(yes) {
    // A focus on what goes must not be lost.
    if (!yes && document.activeElement === byId("stop")) byId("prompt").focus();
    byId("send").disabled = yes;
    byId("stop").hidden = !yes;
    byId("messages").setAttribute("aria-busy", String(yes));
  }
}

/** A new message of the conversation. -> where its text goes. */
function show(role, who) {
  const said = element("div", { class: "said" });
  const message = element("div", { class: `message ${role}` }, element("div", { class: "who" }, who), said);
  following(() => byId("messages").append(message), true);
  return said;
}

/** Change the conversation, and scroll to its end if that was in sight, or if `always`. */
function following(change, always = false) {
  const list = byId("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  change();
  if (atEnd || always) list.scrollTop = list.scrollHeight;
}

/** One answer as it streams in. */
class Answer {
  constructor(said) {
    this.said = said;
    this.summary = element("p", { class: "meta" }, "waiting for the first token …");
    said.after(this.summary);
    this.text = "";
    this.tokens = this.drafts = 0;
    this.begun = performance.now();
  }

  add(chunk) {
    for (const choice of chunk.choices) this.addToken(choice);
    if (chunk.usage) this.last = chunk;
  }

  addToken({ delta, draft }) {
    const { content = "", reasoning_content: thought = "" } = delta;
    this.text += content ?? "";
    if (draft !== undefined) {
      this.tokens += 1;
      this.drafts += draft;
      this.summary.textContent = tokens(this.tokens);
    }
    const text = content || thought;
    if (!text) return;
    const kind = `token${draft ? " draft" : ""}${thought ? " thought" : ""}`;
    following(() => this.said.append(element("span", { class: kind }, text)));
  }

  finish() {
    const { timings = {}, metrics = {} } = this.last ?? {};
    const drafting = metrics.speculative_decoding;
    const speed = timings.tokens_per_second ?? (1000 * this.tokens) / (performance.now() - this.begun);
    const parts = [tokens(this.tokens), `${speed.toFixed(1)} tokens/s`];
    if (timings.ttft_ms) parts.push(`first token after ${duration(timings.ttft_ms)}`);
    if (timings.queue_ms >= 1) parts.push(`of that ${duration(timings.queue_ms)} in the queue`);
    if (drafting?.proposed) {
      parts.push(`${drafting.mean_accepted_length.toFixed(2)} tokens per verification`);
      parts.push(`${percent(drafting.accepted / drafting.proposed)} of the drafts accepted`);
    }
    if (this.tokens) parts.push(`${percent(this.drafts / this.tokens)} of the answer drafted`);
    if (metrics.slo) parts.push(...sloWords(metrics.slo));
    following(() => (this.summary.textContent = parts.join(" · ")));
  }

  fail(message) {
    this.summary.textContent = this.tokens ? tokens(this.tokens) : "";
    following(() => this.summary.after(element("p", { class: "failure" }, message)));
  }
}

/** Which targets were met. */
function sloWords(slo) {
  return ["tpot", "ttft"]
    .filter((name) => typeof slo[`${name}_attained`] === "boolean")
    .map((name) => `${name.toUpperCase()} target ${slo[`${name}_attained`] ? "met" : "missed"}`);
}
