// Small helpers: elements, and numbers as text. Text always enters the page as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** A new element with attributes and children; strings become text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set an element's text, only if it changes: screen readers announce changes. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);

export const fixed = (value, digits) => (value === null ? "–" : value.toFixed(digits));

export const tokens = (count) => (count === 1 ? "1 token" : `${count} tokens`);

/** Milliseconds in the unit that reads best. */
export function duration(ms) {
  const size = Math.abs(ms);
  if (size < 1) return `${ms.toFixed(1)} ms`;
  if (size < 1000) return `${Math.round(ms)} ms`;
  return size < 60_000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms / 60_000)} min`;
}

/** Whitespace of a token made visible. */
export function visible(text) {
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}
