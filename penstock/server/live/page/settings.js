// The sampling settings, kept in this browser. Where a field is empty a default holds, which stands in it and beside it.
// Numbers are checked by the ranges that the API's own schema states.

import { ApiError } from "./api.js";

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const DEFAULTED = ["temperature", "top_p", "top_k"];
const REQUEST = "ChatCompletionRequest";
/** A schema's words for bounds, in ours, with what a value within them satisfies. */
const BOUNDS = {
  minimum: ["at least", (value, bound) => value >= bound],
  exclusiveMinimum: ["above", (value, bound) => value > bound],
  maximum: ["at most", (value, bound) => value <= bound],
  exclusiveMaximum: ["below", (value, bound) => value < bound],
};

export class Settings {
  constructor(element) {
    this._element = element;
    this._fields = Object.fromEntries([...element.querySelectorAll("[name]")].map((field) => [field.name, field]));
    const kept = JSON.parse(localStorage.getItem("penstock-settings") ?? "{}");
    for (const [name, value] of Object.entries(kept)) if (name in this._fields) this._fields[name].value = value;
    element.addEventListener("input", () => this._keep());
    this._summary = element.querySelector("#sampling");
    this._wrong = element.querySelector("#wrong");
    this._defaults = {};
    this._ranges = {};
  }

  /** What is sent where a field is empty, by the request's names; without any the model's own defaults hold. */
  useDefaults(defaults) {
    this._defaults = defaults;
    for (const name of DEFAULTED) this._fields[name].placeholder = defaults[name] ?? "model's";
    this._show();
  }

  /** Check by the API's schema from now on. `longest` is the model's context in tokens, which no schema knows. */
  useSchema(openapi, longest) {
    const properties = openapi.components?.schemas?.[REQUEST]?.properties ?? {};
    for (const name of NUMBERS) {
      const { anyOf = [properties[name] ?? {}] } = properties[name] ?? {};
      this._ranges[name] = { ...anyOf.find(({ type }) => type !== "null") };
    }
    this._ranges.max_tokens.maximum ??= longest;
    this._show();
  }

  /** Set a field as if the reader had typed it. */
  set(name, value) {
    this._fields[name].value = value;
    this._keep();
  }

  _show() {
    const names = [...new Set([...Object.keys(this._defaults), ...DEFAULTED])];
    const values = names.map((name) => [name, this._fields[name]?.value || this._defaults[name]]);
    const words = values.filter(([, value]) => value !== undefined && value !== "");
    this._summary.textContent = words.map(([name, value]) => `${name.replace("_", " ")} ${value}`).join(", ");
    const problems = NUMBERS.map((name) => [name, this._problem(name)]);
    for (const [name, problem] of problems) this._fields[name].setAttribute("aria-invalid", problem !== null);
    this._wrong.textContent = problems.find(([, problem]) => problem !== null)?.[1] ?? "";
  }

  /** Why a field cannot be sent as it is; null where it can. */
  _problem(name) {
    const { validity, value } = this._fields[name];
    if (validity.badInput) return `${name} is not a number; correct it, or leave it empty for the model's default`;
    if (value === "") return null;
    const { type, ...range } = this._ranges[name] ?? {};
    const bounds = Object.entries(BOUNDS).filter(([bound]) => bound in range);
    const wanted = bounds.map(([bound, [word]]) => `${word} ${range[bound]}`);
    const whole = type !== "integer" || Number.isInteger(Number(value));
    if (!whole) return `${name} is ${value}; it has to be a whole number`;
    if (type === "integer" && !Number.isSafeInteger(Number(value)))
      return `${name} is ${value}; a browser sends whole numbers exactly only up to ${Number.MAX_SAFE_INTEGER}`;
    const holds = bounds.every(([bound, [, within]]) => within(Number(value), range[bound]));
    return holds ? null : `${name} is ${value}; it has to be ${wanted.join(" and ")}`;
  }

  /** As the request's fields. ApiError for a field that the API would refuse. */
  get body() {
    const problem = NUMBERS.map((name) => this._problem(name)).find((words) => words !== null);
    if (problem) {
      this._element.open = true;
      throw new ApiError(400, problem);
    }
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
