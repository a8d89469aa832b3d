// The sampling settings, kept in this browser. Where a field is empty a default holds, which stands in it and beside it.

import { ApiError } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const DEFAULTED = ["temperature", "top_p", "top_k"];

export class Settings {
  constructor(element) {
    this._fields = Object.fromEntries([...element.querySelectorAll("[name]")].map((field) => [field.name, field]));
    const kept = JSON.parse(localStorage.getItem("penstock-settings") ?? "{}");
    for (const [name, value] of Object.entries(kept)) if (name in this._fields) this._fields[name].value = value;
    element.addEventListener("input", () => this._keep());
    this._summary = element.querySelector("#sampling");
    this._defaults = {};
  }

  /** What is sent where a field is empty, by the request's names; without any the model's own defaults hold. */
  useDefaults(defaults) {
    this._defaults = defaults;
    for (const name of DEFAULTED) this._fields[name].placeholder = defaults[name] ?? "model's";
    this._show();
  }

  _show() {
    const names = [...new Set([...Object.keys(this._defaults), ...DEFAULTED])];
    const values = names.map((name) => [name, this._fields[name]?.value || this._defaults[name]]);
    const words = values.filter(([, value]) => value !== undefined && value !== "");
    this._summary.textContent = words.map(([name, value]) => `${name.replace("_", " ")} ${value}`).join(", ");
  }

  /** As the request's fields. What is out of range is the server's to refuse, in its words; ApiError for no number. */
  get body() {
    const wrong = NUMBERS.find((name) => this._fields[name].validity.badInput);
    if (wrong) throw new ApiError(400, `${wrong} is not a number; correct it, or leave it empty for the model's default`);
    const given = NUMBERS.filter((name) => this._fields[name].value !== "");
    return { ...this._defaults, ...Object.fromEntries(given.map((name) => [name, Number(this._fields[name].value)])) };
  }

  /** How chats are answered, as the request's fields: nothing but plainly unless it is set. */
  get outline() {
    const mode = this._fields.outline_decoding.value;
    return mode ? { outline_decoding: mode } : {};
  }

  get system() {
    return this._fields.system.value.trim();
  }

  _keep() {
    const values = Object.entries(this._fields).map(([name, field]) => [name, field.value]);
    localStorage.setItem("penstock-settings", JSON.stringify(Object.fromEntries(values)));
    this._show();
  }
}
