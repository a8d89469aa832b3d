// The sampling settings, kept in this browser. An empty field is not sent: the model's own default holds.

import { ApiError } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Settings {
  constructor(element) {
    this._fields = Object.fromEntries([...element.querySelectorAll("[name]")].map((field) => [field.name, field]));
    const kept = JSON.parse(localStorage.getItem("penstock-settings") ?? "{}");
    for (const [name, value] of Object.entries(kept)) if (name in this._fields) this._fields[name].value = value;
    element.addEventListener("input", () => this._keep());
  }

  /** As the request's fields. What is out of range is the server's to refuse, in its words; ApiError for no number. */
  get body() {
    const wrong = NUMBERS.find((name) => this._fields[name].validity.badInput);
    if (wrong) throw new ApiError(400, `${wrong} is not a number; correct it, or leave it empty for the model's default`);
    const given = NUMBERS.filter((name) => this._fields[name].value !== "");
    return Object.fromEntries(given.map((name) => [name, Number(this._fields[name].value)]));
  }

  get system() {
    return this._fields.system.value.trim();
  }

  _keep() {
    const values = Object.entries(this._fields).map(([name, field]) => [name, field.value]);
    localStorage.setItem("penstock-settings", JSON.stringify(Object.fromEntries(values)));
  }
}
