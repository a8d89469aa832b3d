// Light, dark, or what the system says; and the colours for what is drawn on canvases.

const CHOICES = ["auto", "light", "dark"];
const root = document.documentElement;
let known = null;

export function startTheme(button) {
  apply(localStorage.getItem("penstock-theme") ?? "auto", button);
  button.addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(root.dataset.theme) + 1) % CHOICES.length];
    localStorage.setItem("penstock-theme", next);
    apply(next, button);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (known = null));
}

/** The style sheet's colours by name, without their dashes. */
export function colours() {
  if (known === null) {
    const style = getComputedStyle(root);
    const names = ["ink", "muted", "line", "well", "committed", "speculated", "dead", "wasted"];
    known = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    known.font = getComputedStyle(document.body).fontFamily;
  }
  return known;
}

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

function apply(choice, button) {
  root.dataset.theme = CHOICES.includes(choice) ? choice : "auto";
  button.textContent = `Theme: ${root.dataset.theme}`;
  known = null;
  dispatchEvent(new Event("penstock-theme"));
}
