// Requests as lanes over the last minute, coloured by state, in three groups: waiting, running, ended.

import { byId, element, say } from "./dom.js";
import { Lane, STATES, WINDOW } from "./lane.js";

/** Most lanes of ended requests. */
const MOST_ENDED = 12;

export class Lanes {
  constructor() {
    this.lanes = new Map();
    this.names = new Map();
    this.told = new Map(); // ends of the last snapshot, by id
    this.count = this.begun = this.last = 0;
    const group = (title) => {
      const heading = element("h4", { id: `lanes-${title.toLowerCase()}` }, title);
      // The role says again that it is a list: Safari forgets that without list marks.
      const list = element("ol", { role: "list", "aria-labelledby": heading.id });
      byId("lanes").append(heading, list);
      return { heading, list, title };
    };
    this.groups = { waiting: group("Waiting"), running: group("Running"), ended: group("Ended") };
    const ends = ["1 min ago", "now"].map((text) => element("span", {}, text));
    byId("lanes").append(element("div", { class: "axis", "aria-hidden": "true" }, ...ends));
    const legend = Object.entries(STATES).map(([name, meaning]) =>
      element("span", { class: `state state-${name}` }, `${name}: ${meaning}`),
    );
    byId("states").replaceChildren(...legend);
  }

  /** Call the request of an answer by a name; `id` is that of the answer. */
  name(id, name) {
    this.names.set(`${id}-0`, name);
  }

  show(snapshot) {
    if (snapshot.time < this.last || !this.last) {
      this.lanes.clear(); // the server has started again
      this.begun = snapshot.time;
    }
    this.last = snapshot.time;
    const now = snapshot.time - this.begun;
    const shown = { waiting: [], running: [], ended: [] };
    const here = new Set();
    for (const request of snapshot.requests) {
      here.add(request.id);
      if (!this.lanes.has(request.id)) this.lanes.set(request.id, new Lane(++this.count, request));
      const lane = this.lanes.get(request.id);
      lane.update(request, now, this.names.get(request.id));
      shown[request.place === null ? "running" : "waiting"].push(lane);
    }
    const hidden = snapshot.running + snapshot.waiting + snapshot.paused + snapshot.swapped - snapshot.requests.length;
    const ends = new Map(snapshot.ended.map((end) => [end.id, end]));
    for (const [id, end] of ends)
      if (!this.lanes.has(id) && !this.told.has(id))
        this.lanes.set(id, Lane.unseen(++this.count, end, now, this.names.get(id)));
    this.told = ends;
    for (const [id, lane] of this.lanes) {
      if (here.has(id)) continue;
      const end = ends.get(id);
      // With requests hidden, one that is missing may have moved out of sight instead.
      const away = hidden > 0 && lane.ended === null && !end;
      if (now - lane.seen > WINDOW) this.lanes.delete(id);
      else if (!away) shown.ended.push(lane.end(now, end));
    }
    shown.ended.sort((a, b) => b.ended - a.ended || b.number - a.number);
    for (const [id] of [...this.names].slice(0, -50)) this.names.delete(id);
    for (const lane of shown.ended.splice(MOST_ENDED)) this.lanes.delete(lane.id);
    for (const [name, group] of Object.entries(this.groups)) place(group, shown[name]);
    for (const lane of Object.values(shown).flat()) lane.draw(now);
    say(byId("summary"), summary(shown.waiting, snapshot, hidden));
  }
}

/** Put these lanes into the group's list, moving only those that are elsewhere. */
function place({ heading, list, title }, lanes) {
  say(heading, `${title} (${lanes.length})`);
  heading.hidden = !lanes.length;
  lanes.forEach((lane, i) => {
    if (list.children[i] !== lane.node) list.insertBefore(lane.node, list.children[i] ?? null);
  });
  while (list.children.length > lanes.length) list.lastChild.remove();
}

/** Who waits, in one sentence. Screen readers announce it, so it changes only with the requests that wait. */
function summary(waiting, snapshot, hidden) {
  if (!snapshot.running && !waiting.length) return "No requests. Send a message, or sample questions, and watch here.";
  const more = hidden > 0 ? ` ${hidden} more are not shown.` : "";
  if (!waiting.length) return `No request waits.${more}`;
  const names = waiting.slice(0, 5).map((lane) => lane.title);
  const others = waiting.length - names.length;
  const count = waiting.length === 1 ? "1 request waits" : `${waiting.length} requests wait`;
  return `${count}: ${names.join(", ")}${others ? ` and ${others} more` : ""}.${more}`;
}
