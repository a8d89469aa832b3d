// The sampling settings, kept in this browser. An empty field is not sent: the model's own default holds.

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

export class Settings {
  constructor(element) {
    this._fields = Object.fromEntries([...element.querySelectorAll("[name]")].map((field) => [field.name, field]));
    const kept = JSON.parse(localStorage.getItem("penstock-settings") ?? "{}");
    for (const [name, value] of Object.entries(kept)) if (name in this._fields) this._fields[name].value = value;
    element.addEventListener("input", () => this._keep());
  }

  /** As the request's fields. What is out of range is the server's to refuse, in its words. */
  get body() {
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
