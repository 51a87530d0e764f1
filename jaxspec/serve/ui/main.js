// Wires the page: key, models, chat, live view.

import { call, storedKey, storeKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { Live } from "./live.js";
import { sendSamples } from "./samples.js";

async function loadModels() {
  const { data } = await (await call("v1/models")).json();
  byId("model").replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
}

async function start() {
  byId("key-form").hidden = true;
  try {
    await loadModels();
  } catch (error) {
    if (error.status === 401) askForKey();
    else byId("server").textContent = error.message;
  }
  live.connect();
}

function askForKey() {
  if (!byId("key-form").hidden) return;
  byId("key-form").hidden = false;
  byId("key").value = storedKey();
  byId("key").focus();
}

const live = new Live(askForKey);
const chat = new Chat({ onId: (id) => live.lanes.name(id, "your chat"), onUnauthorized: askForKey });

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  start();
});
byId("load").addEventListener("submit", (event) => {
  event.preventDefault();
  live.notice("");
  sendSamples(Number(byId("load-count").value), chat.settings(), (message) => live.notice(message));
});
byId("pause").addEventListener("click", () => live.pause(!live.paused));
// A hidden tab shows nothing: the server need not take snapshots for it.
document.addEventListener("visibilitychange", () => (document.hidden ? live.disconnect() : live.connect()));
start();
