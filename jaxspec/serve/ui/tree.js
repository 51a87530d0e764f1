// The last verified token tree: levels from left to right, the accepted path marked.

import { byId, drawn, duration, element, say, visible } from "./dom.js";

const WIDTH = 84;
const HEIGHT = 24;
const GAP_X = 22;
const GAP_Y = 8;
const LONGEST = 9;

let last = "";

/** Show a tree; null: none was verified yet. */
export function showTree(tree, drafters) {
  if (!tree) {
    const why = drafters.length ? "No tree has been verified while you watched." : "Speculation is off: no drafters.";
    say(byId("tree-note"), why);
    return;
  }
  const whose = tree.own ? "" : " It is another key's request, so its text is not shown.";
  const ago = tree.age_ms < 1500 ? "just now" : `${duration(tree.age_ms)} ago`;
  const what = `${tree.accepted} of ${tree.proposed} draft tokens accepted`;
  byId("tree-note").textContent = `${what}, ${ago}.${whose}`;
  const key = JSON.stringify(tree.nodes);
  if (key === last) return;
  last = key;
  showPath(tree.nodes);
  byId("tree").replaceChildren(picture(tree.nodes));
}

function showPath(nodes) {
  const path = nodes.filter((node) => node.accepted);
  const token = (node, i) => {
    const kind = node.drafters.length ? " draft" : i ? " bonus" : "";
    return element("span", { class: `token${kind}` }, node.text ?? "▢");
  };
  byId("tree-path").replaceChildren(...path.map(token));
}

/** What the picture shows. */
function inWords(nodes) {
  const [accepted, rejected] = [true, false].map((yes) => {
    const some = nodes.filter((node) => node.accepted === yes);
    return some.map(shown).join(", ") || "none";
  });
  const size = nodes.length === 1 ? "1 node" : `${nodes.length} nodes`;
  return `Token tree of ${size}. Accepted: ${accepted}. Rejected: ${rejected}.`;
}

function picture(nodes) {
  const rows = rowsOf(nodes);
  const at = (i) => ({ x: 2 + nodes[i].depth * (WIDTH + GAP_X), y: 2 + rows[i] * (HEIGHT + GAP_Y) });
  const deepest = Math.max(...nodes.map((node) => node.depth));
  const width = (deepest + 1) * (WIDTH + GAP_X);
  const height = (Math.max(...rows) + 1) * (HEIGHT + GAP_Y) + 2;
  const svg = drawn("svg", { width, height, role: "img", "aria-label": inWords(nodes) });
  const order = [...nodes.keys()].sort((a, b) => nodes[a].accepted - nodes[b].accepted);
  const below = order.filter((i) => nodes[i].parent >= 0);
  svg.append(...below.map((i) => edge(at(nodes[i].parent), at(i), nodes[i])));
  nodes.forEach((node, i) => svg.append(box(node, at(i))));
  return svg;
}

/** The row of each node: the first child is in its parent's row, further ones below. Accepted children come first. */
function rowsOf(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach(({ parent }, i) => parent >= 0 && children[parent].push(i));
  const rows = [];
  let used = 0;
  const put = (i, row) => {
    rows[i] = row;
    children[i].sort((a, b) => nodes[b].accepted - nodes[a].accepted);
    children[i].forEach((child, k) => put(child, k ? ++used : row));
  };
  put(0, 0);
  return rows;
}

function edge(from, to, node) {
  const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const middle = (x1 + x2) / 2;
  const d = `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return drawn("path", { d, class: `edge${node.accepted ? " accepted" : ""}` });
}

const shown = ({ text }) => (text === null ? "▢" : visible(text));

function box(node, { x, y }) {
  const text = shown(node);
  const short = text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text;
  const own = node.drafters.length ? "" : " target";
  const itself = node.depth ? "the model's own" : "known";
  const source = node.drafters.length ? `drafted by ${node.drafters.join(", ")}` : itself;
  const verdict = node.accepted ? "accepted" : "rejected";
  return drawn(
    "g",
    { class: `node${node.accepted ? " accepted" : ""}${own}` },
    drawn("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 5 }),
    drawn("text", { x: x + WIDTH / 2, y: y + 17, "text-anchor": "middle" }, short),
    drawn("title", {}, `${text}: ${source}${own ? "" : `, ${verdict}`}`),
  );
}
