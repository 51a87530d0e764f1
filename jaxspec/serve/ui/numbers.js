// The numbers at the top of the live view, and the policy at its end.

import { byId, element, fixed, percent, say } from "./dom.js";

const WORDS = {
  order: "order",
  pace: "pace",
  batching: "batching",
  memory: "memory",
  tree: "tree",
  draft_choice: "draft choice",
  predictor: "length predictor",
};

const LENGTH = "Tokens per verification in the last seconds, bonus included";
const SLO = "Requests with a TTFT or TPOT target that met all of theirs, of those that ended since the server started";

export function showNumbers(snapshot) {
  const { met, missed } = snapshot.slo;
  const waiting = snapshot.waiting + snapshot.paused + snapshot.swapped;
  tile("Output", fixed(snapshot.tokens_per_second, 1), "tokens/s");
  tile("Running", String(snapshot.running), `of ${snapshot.slots} slots`);
  tile("Waiting", String(waiting), lost(snapshot));
  tile("KV cache", percent(snapshot.kv_usage), `of ${snapshot.kv_pages} pages`);
  tile("Drafts", percent(snapshot.acceptance_rate), "accepted", "Share of the draft tokens of the last seconds");
  tile("Mean length", fixed(snapshot.mean_accepted_length, 2), "accepted", LENGTH);
  tile("SLO met by", met + missed ? percent(met / (met + missed)) : "–", `of ${met + missed} requests`, SLO);
  showPolicy(snapshot);
}

function lost({ paused, swapped }) {
  return [paused && `${paused} paused`, swapped && `${swapped} swapped out`].filter(Boolean).join(", ");
}

function tile(name, value, unit, meaning = "") {
  const id = `tile-${name.replaceAll(" ", "-").toLowerCase()}`;
  let shown = byId(id);
  if (!shown) {
    shown = element("dd", { id }, element("span"), " ", element("small"));
    byId("tiles").append(element("div", { title: meaning }, element("dt", {}, name), shown));
  }
  say(shown.children[0], value);
  say(shown.children[1], unit);
}

function showPolicy({ policy, drafters, rule }) {
  say(byId("rule"), `In the queue, ${rule}.`);
  const rows = Object.entries(WORDS).map(([slot, word]) => [word, policy[slot]]);
  rows.push(["drafters", drafters.join(", ") || "none"]);
  const text = JSON.stringify(rows);
  if (byId("policy").dataset.shown === text) return;
  byId("policy").dataset.shown = text;
  const row = ([word, value]) => element("div", {}, element("dt", {}, word), element("dd", {}, value));
  byId("policy").replaceChildren(...rows.map(row));
}
