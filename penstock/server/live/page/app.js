// Wires the page: theme, chat on the left, the engine's live view on the right.

import { startChat } from "./chat.js";
import { call } from "./api.js";
import { Live } from "./live.js";
import { startTheme } from "./theme.js";

let card = null;

startTheme(document.getElementById("theme"));
const live = new Live();
startChat({ served, schema, onRequest: (id) => live.follow(id) });
live.follow(null);

/** What the server says of its model; asked for until it is known. */
async function served() {
  if (card === null) {
    const response = await call("v1/models");
    card = (await response.json()).data[0];
    document.getElementById("model").textContent = card.id;
    document.title = `${card.id} · Penstock`;
  }
  return card;
}

/** The API's own description. */
async function schema() {
  return (await call("openapi.json")).json();
}
