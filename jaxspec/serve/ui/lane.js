// One request's lane: what it does now, why it waits, and a bar of what it did in the last minute.

import { drawn, duration, element, percent, say, tokens } from "./dom.js";

/** Seconds that a lane shows. */
export const WINDOW = 60;
export const STATES = {
  waiting: "has no slot yet",
  prefill: "reads its prompt",
  decoding: "writes its answer",
  throttled: "skips steps",
  paused: "lost its slot",
  swapped: "its KV is in host memory",
};
const SLACK =
  "Time left until a target is missed. TTFT: time to first token. TPOT: time per output token; tokens that came " +
  "early leave time for later ones.";
/** Most segments that a lane keeps. */
const MOST_SEGMENTS = 200;

export class Lane {
  constructor(number, { id }) {
    this.id = id;
    this.number = number;
    this.title = `#${number}`;
    this.segments = [];
    this.ended = null;
    this.parts = {
      name: element("span", { class: "name" }),
      badge: element("span", { class: "badge" }),
      numbers: element("span", { class: "numbers" }),
      slack: element("span", { class: "slack" }),
      why: element("div", { class: "why" }),
      history: element("div", { class: "history" }),
    };
    const { name, badge, numbers, slack, why, history } = this.parts;
    slack.title = SLACK;
    this.bar = drawn("svg", { preserveAspectRatio: "none", role: "img" });
    this.node = element("li", { tabindex: "0", "data-id": id });
    this.node.append(element("div", { class: "line" }, name, badge, slack, numbers), this.bar, why, history);
  }

  /** One that no snapshot had, because it was too short: only its end is known. */
  static unseen(number, end, now, name) {
    const lane = new Lane(number, end);
    lane.call(name);
    const ended = now - end.age_ms / 1000;
    lane.begin({ state: "unseen", reason: null }, ended - end.took_ms / 1000);
    lane.segments[0].end = ended;
    return lane;
  }

  /** Take over what a snapshot of the time `now` says. */
  update(request, now, name) {
    this.request = request;
    this.ended = null; // a request may come back after the engine has restarted
    this.call(name);
    const last = this.segments.at(-1);
    if (last) last.end = now;
    if (last?.state === request.state) last.reason = request.reason ?? last.reason;
    else this.begin(request, now);
    const { place, state } = request;
    say(this.parts.badge, place === null ? state : `${state}, ${place ? `${place} ahead` : "next"}`);
    say(this.parts.numbers, numbers(request));
    say(this.parts.why, request.reason ?? "");
    this.showSlack(request);
  }

  call(name) {
    this.title = name ? `#${this.number} (${name})` : `#${this.number}`;
  }

  begin({ state, reason }, now) {
    const shape = drawn("rect", { y: 0, height: 1, x: now, width: 0, class: `state state-${state}` });
    this.segments.push({ state, reason, begin: now, end: now, shape });
    this.bar.append(shape);
    if (this.segments.length > MOST_SEGMENTS) this.segments.shift().shape.remove();
  }

  /** When a snapshot last had it, or it ended. */
  get seen() {
    return this.segments.at(-1).end;
  }

  /** The request is no longer there. `last` says how it ended: it may come a snapshot later, and only for some seconds.
   * -> this lane. */
  end(now, last) {
    const { badge, numbers, slack, why } = this.parts;
    if (this.ended === null) {
      this.ended = last ? now - last.age_ms / 1000 : now;
      say(badge, "ended");
      for (const part of [numbers, slack, why]) say(part, "");
    }
    if (last) {
      say(badge, `ended: ${last.finish_reason}`);
      say(numbers, `${tokens(last.output_tokens)} written · took ${duration(last.took_ms)}`);
    }
    return this;
  }

  draw(now) {
    const { node, parts, segments } = this;
    say(parts.name, this.title);
    node.className = `lane state ${this.ended === null ? `state-${this.request.state}` : "ended"}`;
    this.bar.setAttribute("viewBox", `${now - WINDOW} 0 ${WINDOW} 1`);
    segments.at(-1).shape.setAttribute("width", Math.max(0.15, segments.at(-1).end - segments.at(-1).begin));
    if (segments.length > 1) segments.at(-2).shape.setAttribute("width", segments.at(-2).end - segments.at(-2).begin);
    const past = segments.slice(-8).map(told).join(" → ");
    say(parts.history, `${this.id}: ${past}`);
    this.bar.setAttribute("aria-label", `The last minute: ${past}`);
  }

  showSlack({ slack_of: of, slack_ms: slack, tpot_ms: tpot, ttft_ms: ttft }) {
    const { slack: node } = this.parts;
    node.className = `slack ${slack === null ? "" : slack < 0 ? "late" : "met"}`;
    if (of === null) return say(node, tpot ? `TPOT target ${duration(tpot)}` : "");
    const target = `${of.toUpperCase()} ${duration(of === "tpot" ? tpot : ttft)}`;
    say(node, `${target}: ${slack < 0 ? `late by ${duration(-slack)}` : `slack ${duration(slack)}`}`);
  }
}

/** The progress of a request in words. */
function numbers(request) {
  const parts = [];
  const { prompt_tokens: prompt, prompt_done: done, output_tokens: output, predicted_tokens: predicted } = request;
  if (!output) parts.push(done ? `prompt ${done} of ${prompt} tokens` : `prompt of ${tokens(prompt)}`);
  else parts.push(`${tokens(output)} written`);
  parts.push(predicted === null ? `at most ${request.max_tokens} to write` : `about ${predicted} predicted`);
  if (request.acceptance_rate !== null) parts.push(`${percent(request.acceptance_rate)} of drafts accepted`);
  if (request.preemptions) parts.push(`preempted ${request.preemptions} ×`);
  parts.push(`came ${duration(request.age_ms)} ago`);
  return parts.join(" · ");
}

/** A part of a request's past in words. */
function told({ state, reason, begin, end }) {
  return `${state} ${duration(1000 * (end - begin))}${reason ? ` (${reason})` : ""}`;
}
