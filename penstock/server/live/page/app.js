// Wires the page: theme, chat on the left, the engine's live view on the right.

import { startChat } from "./chat.js";
import { call } from "./api.js";
import { Live } from "./live.js";
import { startTheme } from "./theme.js";

let name = null;

startTheme(document.getElementById("theme"));
const live = new Live();
startChat({ model, onRequest: (id) => live.follow(id) });
live.follow(null);

/** The served model's name; asked for until it is known. */
async function model() {
  if (name === null) {
    const response = await call("v1/models");
    name = (await response.json()).data[0].id;
    document.getElementById("model").textContent = name;
    document.title = `${name} · Penstock`;
  }
  return name;
}
